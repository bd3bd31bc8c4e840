#!/usr/bin/env bash
# Check, profile and validate one CUDA GPU, and pack what came out: examples/gpu.sh OUT [STAGE...]
#
# Stages, all of them if none is named; each is given less than nine minutes:
#   smoke             lanes, memory and link; every policy on a small model against the unmodified one; the tests of CUDA lanes
#   profile           microbenchmarks of the models of the next three, into OUT/profile.yaml
#   deepseek-v2-lite  measured and predicted, the whole model, on a bundled trace
#   qwen3-30b-a3b     the same of its first 24 layers, on made-up routing
#   mixtral-8x7b      the same of its first 4 layers: the experts of 8, and those of the microbenchmarks, fill 24 GB
#   peer              Trilane, accelerate's offload and llama-bench, where these are installed: all on one small model made for
#                     that, of 1.2 GB of experts in 0.7 GB of GPU memory; it is none of the models above
#   pack              OUT/results.zip of at most 16 MB
# A stage that fails does not stop the next. The same command again goes on where it was stopped, also within a validation;
# what is done is not repeated (OUT/done says what that is: remove a file there to do it again).
# It needs no checkpoint and no internet: experts and attention have their full size and random weights. 64 GB of host memory.
#
# Other than torch (2.11 or newer) and transformers (5.17 or newer), simpy, pandas, pyarrow, scipy, safetensors, typer, rich,
# matplotlib, pyyaml and what these depend on must be importable. On a machine without internet, bring them as wheels:
#   pip install --no-index --no-deps --target DIR *.whl; export PYTHONPATH=DIR
# (`make gpu` is for a machine with internet: it installs all of it, with the pinned torch, into .venv.)
#
# From the environment, with defaults:
#   TRILANE=trilane    the command; in a checkout without installation TRILANE="python3 -m trilane"
#   PYTHON=python3     with the machine's own torch and transformers, and what else Trilane needs (below)
#   LANES=cuda         host-lanes: without a GPU, with models of 1 or 2 layers and short texts
#   MEMORY_GB          GPU memory that may be used; default: what is free, 24 at most
#   STAGE_SECONDS=500  given to each stage
#   TRILANE_HOST_MEMORY_GB  host memory that experts may take, where a virtual machine shows less than it has
# Exit status: 0 all passed, 1 one failed or was stopped, 3 one has run out of time and goes on when asked again.
set -uo pipefail

refuse() { echo "examples/gpu.sh: $*" >&2; exit 2; }

case ${1:-} in
  -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
  ""|-*) refuse "expected a folder to write to, got '${1:-}'; usage: examples/gpu.sh OUT [STAGE...], as in examples/gpu.sh out/gpu" ;;
esac
out=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
trilane=${TRILANE:-trilane} python=${PYTHON:-python3} lanes=${LANES:-cuda}
stage_seconds=${STAGE_SECONDS:-500} report_seconds=120  # of these, what a validation takes after its last run, at most
policies=fiddler,on-demand,mixtral-offloading,dali,hybrimoe,best-exact
stages=(smoke profile deepseek-v2-lite qwen3-30b-a3b mixtral-8x7b peer pack)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# A stream that waits for the CPU's experts must hold up no other: a hardware queue for each, and kernels loaded before.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
export PYTHONFAULTHANDLER=1  # a command that hangs and is ended tells where

for stage in "$@"; do
  [[ " ${stages[*]} " == *" $stage "* ]] || refuse "expected stages among ${stages[*]}, got $stage"
done
[[ $stage_seconds =~ ^[1-9][0-9]*$ ]] || refuse "expected STAGE_SECONDS as a whole number, got $stage_seconds"
for command in "${trilane%% *}" "$python" timeout; do
  command -v "$command" > /dev/null || refuse "$command: no such command; in a checkout TRILANE='python3 -m trilane' PYTHON=python3"
done

free_gb() {  # GB (10^9 bytes) free on the GPU, 24 at most
  local found
  found=$($python -c 'import torch; print(f"{min(24.0, torch.cuda.mem_get_info()[0] / 1e9 - 0.5):.1f}")' 2>/dev/null)
  [[ $found =~ ^[0-9]+\.[0-9]$ ]] && echo "$found" || echo 24
}

case $lanes in
  cuda)
    models=(deepseek-v2-lite qwen3-30b-a3b:24 mixtral-8x7b:4) traced=mini-deepseek device=cuda
    profiling=(--lanes cuda --memory-gb "${MEMORY_GB:-$(free_gb)}" --quick --batch 1,4 --context 32,64 --prompt 32)
    smaller=() ;;
  host-lanes)
    models=(deepseek-v2-lite:2 qwen3-30b-a3b:2 mixtral-8x7b:1) traced=mini-deepseek:2 device=fake
    profiling=(--lanes host-lanes --quick --batch 1,4 --context 8,12 --prompt 8)
    smaller=(--set prompt_tokens=8 --set generated_tokens=4 --repeats 1) ;;
  *) refuse "expected LANES=cuda or LANES=host-lanes, got $lanes" ;;
esac

# --- the stages -------------------------------------------------------------------------------------------------------

smoke() {
  once smoke $trilane smoke --lanes "$lanes" --json "$out/smoke.json"
  if $python -c 'import pytest, hypothesis' 2>/dev/null; then
    once device-tests $python -m pytest -p no:cacheprovider -c "$root/pyproject.toml" --rootdir "$root" --device $device \
      "$root"/tests/realrun/test_cuda_*.py
  else
    say "the tests of the CUDA lanes are left out: pytest or hypothesis is not installed"
  fi
}

profile() {
  for model in "${models[@]}"; do
    once "profile-${model%%:*}" $trilane profile -o "$out/profile.yaml" "${profiling[@]}" --model "$model" --policies $policies
  done
}

validate() {  # NAME
  local name=$1 model limit routing=(--set "trace=$traced")
  for model in "${models[@]}"; do [ "${model%%:*}" = "$name" ] && break; done
  if [ "$name" != deepseek-v2-lite ]; then
    once "$name-trace" $trilane trace synth --like "$model" -o "$out/$name.safetensors" --seed 1
    once "$name-calibration" $trilane trace synth --like "$model" -o "$out/$name-calibration.safetensors" --seed 2
    routing=(--set "trace=$out/$name.safetensors" --set "calibration=$out/$name-calibration.safetensors")
  fi
  mkdir -p "$out/$name"
  limit=$((deadline - SECONDS - report_seconds))
  once "$name" $trilane validate "$root/examples/gpu.yaml" --profile "$out/profile.yaml" --set "model=$model" \
    "${routing[@]}" ${smaller[@]+"${smaller[@]}"} --out "$out/$name" --json "$out/$name/agreement.json" \
    --time-limit $((limit > 0 ? limit : 1))
}

peer() {
  if $python -c 'import accelerate' 2>/dev/null; then
    once peer $python -m tests.bench.beside_accelerate --out "$out/peer"
  else
    say "the peers are left out: accelerate is not installed"
  fi
}

pack() { again pack $python "$root/examples/pack_results.py" "$out" "$out/results.zip"; }

# --- what runs them ---------------------------------------------------------------------------------------------------

say() { echo "$(date -u +%H:%M:%S) $*"; }

once() {  # NAME COMMAND...: unless it is done
  if [ -e "$out/done/$1" ]; then
    say "$1 is done already; remove $out/done/$1 to do it again"
  else
    again "$@" && touch "$out/done/$1"
  fi
}

again() {  # NAME COMMAND...: within what is left of the stage's time; the worst exit status becomes the stage's
  local name=$1 status left=$((deadline - SECONDS))
  shift
  [ -z "$stopped" ] || return 1
  say "$name: $*"
  timeout --kill-after=30 $((left > 0 ? left : 1)) "$@" > >(tee -a "$out/logs/$name.log") 2>&1 &
  child=$!
  wait $child
  status=$?
  while kill -0 $child 2>/dev/null; do  # a signal ended the waiting, not the command
    wait $child
    status=$?
  done
  say "$name: exit status $status"
  if [ $status -ne 0 ] && { [ $result -eq 0 ] || [ $status -ne 3 ]; }; then result=$status; fi
  return $status
}

stop() {
  stopped=yes
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}

in_words() {  # EXIT STATUS
  case $1 in 0) echo passed ;; 3) echo "passed in part, goes on when run again" ;; *) echo "failed (status $1)" ;; esac
}

[ $# -eq 0 ] || stages=("$@")
mkdir -p "$out/done" "$out/logs"
child="" stopped="" worst=0
trap stop INT TERM
: > "$out/stages.txt"
for stage in "${stages[@]}"; do
  if [ -n "$stopped" ]; then
    printf '%-18s%s\n' "$stage" "not begun: stopped" >> "$out/stages.txt"
    continue
  fi
  began=$SECONDS deadline=$((SECONDS + stage_seconds)) result=0
  case $stage in smoke|profile|peer|pack) $stage ;; *) validate "$stage" ;; esac
  printf '%-18s%4d s  %s\n' "$stage" $((SECONDS - began)) "$(in_words $result)" >> "$out/stages.txt"
  case $result in 0) ;; 3) [ $worst -ne 0 ] || worst=3 ;; *) worst=1 ;; esac
done
echo
cat "$out/stages.txt"
[ -z "$stopped" ] || worst=1
exit $worst
