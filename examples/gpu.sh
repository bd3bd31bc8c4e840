#!/usr/bin/env bash
# Check, profile and validate one CUDA GPU, and pack the results: examples/gpu.sh OUT [STAGE...]
#
# Stages (default: all); each takes less than nine minutes (estimated), but for the three of llama.cpp after its build:
#   smoke             lanes, memory and link; every policy on a small model compared with the unmodified one, some on two GPUs
#                     (skipped, and said to be, where there is one); the tests of CUDA lanes
#   profile           microbenchmarks of the models of the next three stages, into OUT/profile.yaml
#   deepseek-v2-lite  the whole model, measured and predicted, on a bundled trace
#   qwen3-30b-a3b     the same for its first 24 layers, on synthetic routing
#   mixtral-8x7b      the same for its first 4 layers: the experts of 8, with those of the microbenchmarks, would fill 24 GB
#   llama.cpp-build   the library of llama.cpp for CUDA, unless one is found that uses the GPU (examples/build_llama.sh)
#   llama.cpp-profile microbenchmarks of llama.cpp: kernels by format and rows, layers that the CPU takes part in, copies
#   llama.cpp-qwen3-30b-a3b, llama.cpp-gpt-oss-20b
#                     the whole model in llama.cpp, with the experts of five numbers of layers on the CPU (--n-cpu-moe): measured,
#                     and predicted from these microbenchmarks alone. These three write up to 17 GB each, and how long they
#                     take is not known: they have a time limit of their own, LLAMA_SECONDS
#   peer              Trilane, accelerate's offload and llama-bench, if these are installed: all on one small model that is made
#                     for this, with 1.2 GB of experts in 0.7 GB of GPU memory
#   pack              OUT/results.zip of at most 16 MB
# A stage that fails does not stop the next one. The same command again continues where it was stopped, even within a
# validation; what is done is not repeated (OUT/done has a file for each part: remove it to do the part again). Only
# llama.cpp-profile and the models of llama.cpp keep nothing when they are stopped: they fail, and begin anew.
# It needs neither a checkpoint nor the internet: experts and attention have their full size and random weights. It needs
# 64 GB of host memory.
#
# In addition to torch (2.11 or newer) and transformers (5.17 or newer), it needs simpy, pandas, pyarrow, scipy, safetensors,
# typer, rich, matplotlib, pyyaml and their dependencies. On a machine without internet, install them from wheels:
#   pip install --no-index --no-deps --target DIR *.whl; export PYTHONPATH=DIR
# llama.cpp needs the package gguf, and its library: cmake, a C++ compiler and nvcc, and on a machine without internet its
# sources, 38 MB (see examples/build_llama.sh); or a library that is there, named in LLAMA_LIBRARY. Its models take 17 GB of disk.
# (`make gpu` is for a machine with internet: it installs everything, with the pinned torch, into .venv.)
#
# Environment variables, with their defaults:
#   TRILANE=trilane    the command; in a checkout without installation TRILANE="python3 -m trilane"
#   PYTHON=python3     an interpreter with torch, transformers and the packages above
#   LANES=cuda         host-lanes: without a GPU, with models of 1 or 2 layers and short texts
#   MEMORY_GB          GPU memory to use; default: the free memory, at most 24
#   STAGE_SECONDS=500  time limit of each stage
#   LLAMA_SECONDS=3600 that of llama.cpp-profile and of each model of llama.cpp
#   LLAMA_LIBRARY      a libllama.so of build 11549 that uses the GPU; default: what the package xllamacpp brings, or a build
#   LLAMA_BUILD        the folder of that build; default: build/llama.cpp in the checkout
#   LLAMA_SOURCES      xllamacpp-2026.10.11549.tar.gz, where it cannot be downloaded
#   CUDA_VISIBLE_DEVICES=0  the GPU of all stages: one, since llama.cpp would spread a model over all; the first stage uses 0,1
#   HARDWARE           this machine's parts, such as rtx-4090+ddr5-5600, for the null model; default: those that are found
#   TRILANE_HOST_MEMORY_GB  host memory for experts, if a virtual machine shows less than it has
# Exit status: 0 all passed, 1 one failed or was stopped, 3 one ran out of time and continues when run again.
set -uo pipefail

refuse() { echo "examples/gpu.sh: $*" >&2; exit 2; }

case ${1:-} in
  -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
  ""|-*) refuse "expected a folder to write to, got '${1:-}'; usage: examples/gpu.sh OUT [STAGE...], for example examples/gpu.sh out/gpu" ;;
esac
out=$1
shift
root=$(cd "$(dirname "$0")/.." && pwd)
trilane=${TRILANE:-trilane} python=${PYTHON:-python3} lanes=${LANES:-cuda}
stage_seconds=${STAGE_SECONDS:-500} llama_seconds=${LLAMA_SECONDS:-3600}
report_seconds=120  # of a stage's time, at most, for a validation after its last run
policies=fiddler,on-demand,mixtral-offloading,dali,hybrimoe,best-exact
stages=(smoke profile deepseek-v2-lite qwen3-30b-a3b mixtral-8x7b llama.cpp-build llama.cpp-profile
  llama.cpp-qwen3-30b-a3b llama.cpp-gpt-oss-20b peer pack)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# A stream that waits for CPU experts must not delay others: each has a hardware queue, and kernels are loaded in advance.
export CUDA_DEVICE_MAX_CONNECTIONS=32 CUDA_MODULE_LOADING=EAGER
two_gpus=${CUDA_VISIBLE_DEVICES:-0,1}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
export PYTHONFAULTHANDLER=1  # print a traceback when a command that hangs is ended

for stage in "$@"; do
  [[ " ${stages[*]} " == *" $stage "* ]] || refuse "expected stages among ${stages[*]}, got $stage"
done
[[ $stage_seconds =~ ^[1-9][0-9]*$ ]] || refuse "expected STAGE_SECONDS as a whole number, got $stage_seconds"
[[ $llama_seconds =~ ^[1-9][0-9]*$ ]] || refuse "expected LLAMA_SECONDS as a whole number, got $llama_seconds"
for command in "${trilane%% *}" "$python" timeout; do
  command -v "$command" > /dev/null || refuse "$command: no such command; in a checkout TRILANE='python3 -m trilane' PYTHON=python3"
done

free_gb() {  # GB (10^9 bytes) free on the GPU, 24 at most
  local found
  found=$($python -c 'import torch; print(f"{min(24.0, torch.cuda.mem_get_info()[0] / 1e9 - 0.5):.1f}")' 2>/dev/null)
  [[ $found =~ ^[0-9]+\.[0-9]$ ]] && echo "$found" || echo 24
}

cores() {  # physical ones of the CPU
  local found
  found=$($python -c 'from realrun.machine.cores import physical_cores; print(len(physical_cores()))' 2>/dev/null)
  [[ $found =~ ^[1-9][0-9]*$ ]] && echo "$found" || echo 8
}

case $lanes in
  cuda)
    models=(deepseek-v2-lite qwen3-30b-a3b:24 mixtral-8x7b:4) traced=mini-deepseek device=cuda
    profiling=(--lanes cuda --memory-gb "${MEMORY_GB:-$(free_gb)}" --quick --batch 1,4 --context 32,64 --prompt 32)
    smaller=()
    llama_models=(qwen3-30b-a3b@q4_0 gpt-oss-20b@mxfp4) llama_library=gpu_name llama_plan=gpu-llama.yaml
    llama_profiling=(--gpu --rounds 2 --threads "$(cores)")
    llama_settings=(--set "hardware=${HARDWARE:-here}" --set "threads=[$(cores)]") ;;
  host-lanes)
    models=(deepseek-v2-lite:2 qwen3-30b-a3b:2 mixtral-8x7b:1) traced=mini-deepseek:2 device=fake
    profiling=(--lanes host-lanes --quick --batch 1,4 --context 8,12 --prompt 8)
    smaller=(--set prompt_tokens=8 --set generated_tokens=4 --repeats 1)
    llama_models=(qwen3-30b-a3b@q4_0:2 gpt-oss-20b@mxfp4:2) llama_library=llama_library llama_plan=validation-llama.yaml
    llama_profiling=(--rounds 1 --threads 1)
    llama_settings=(--set "threads=[1]" --set "depths=[0]" --set "prompts=[32]" --set repeats=2) ;;
  *) refuse "expected LANES=cuda or LANES=host-lanes, got $lanes" ;;
esac

# --- the stages -------------------------------------------------------------------------------------------------------

smoke() {
  once smoke env CUDA_VISIBLE_DEVICES="$two_gpus" $trilane smoke --lanes "$lanes" --json "$out/smoke.json"
  if $python -c 'import pytest, hypothesis' 2>/dev/null; then
    once device-tests $python -m pytest -p no:cacheprovider -c "$root/pyproject.toml" --rootdir "$root" --device $device \
      "$root"/tests/realrun/*/test_cuda_*.py
  else
    say "the tests of CUDA lanes are left out: pytest or hypothesis is not installed"
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
    once peer $python -m benchmarks.beside_accelerate --out "$out/peer"
  else
    say "the peers are left out: accelerate is not installed"
  fi
}

# llama.cpp: what the package xllamacpp brings, or LLAMA_LIBRARY, or a build of our own
llama_build=${LLAMA_BUILD:-$root/build/llama.cpp}
[ -n "${LLAMA_LIBRARY:-}" ] || [ ! -e "$llama_build/bin/libllama.so" ] || export LLAMA_LIBRARY=$llama_build/bin/libllama.so

llama_found() { $python -c "from realrun.llama_cpp.abi import $llama_library as library; library()" > /dev/null 2>&1; }

build_llama() {
  if llama_found; then
    say "llama.cpp is there"
  elif [ -n "${LLAMA_LIBRARY:-}" ]; then
    again llama.cpp-build $python -c "from realrun.llama_cpp.abi import $llama_library as library; print(library())"
  elif [ $lanes = host-lanes ]; then
    say "llama.cpp is left out: the package xllamacpp is not installed, and LLAMA_LIBRARY is not set"
  else
    BUILD_SECONDS=$((deadline - SECONDS > 60 ? deadline - SECONDS - 30 : 30)) again llama.cpp-build \
      "$root/examples/build_llama.sh" "$llama_build" ${LLAMA_SOURCES:+"$LLAMA_SOURCES"} \
      && export LLAMA_LIBRARY=$llama_build/bin/libllama.so
  fi
}

llama_can_run() {
  if ! $python -c 'import gguf' 2>/dev/null; then
    say "llama.cpp is left out: the package gguf is not installed"
  elif ! llama_found; then
    say "llama.cpp is left out: there is no library, which the stage llama.cpp-build makes"
  else
    return 0
  fi
  return 1
}

profile_llama() {
  llama_can_run || return 0
  once llama.cpp-profile $trilane profile --engine llama.cpp -o "$out/llama.cpp.yaml" "${llama_profiling[@]}" \
    --blocks q4_0,q6_k,q8_0,mxfp4 --json "$out/llama.cpp.json"
}

validate_llama() {  # STAGE
  local stage=$1 model
  llama_can_run || return 0
  for model in "${llama_models[@]}"; do [ "llama.cpp-${model%%[:@]*}" = "$stage" ] && break; done
  once "$stage" $trilane validate "$root/examples/$llama_plan" --engine llama.cpp --profile "$out/llama.cpp.yaml" \
    --set "models=['$model']" "${llama_settings[@]}" --out "$out/$stage" --json "$out/$stage.json"
}

pack() { again pack $python "$root/examples/pack_results.py" "$out" "$out/results.zip"; }

# --- running them -----------------------------------------------------------------------------------------------------

say() { echo "$(date -u +%H:%M:%S) $*"; }

once() {  # NAME COMMAND...: run it unless it is done
  if [ -e "$out/done/$1" ]; then
    say "$1 is done already; remove $out/done/$1 to do it again"
  else
    again "$@" && touch "$out/done/$1"
  fi
}

again() {  # NAME COMMAND...: run it in the rest of the stage's time; the worst exit status becomes the stage's
  local name=$1 status left=$((deadline - SECONDS))
  shift
  [ -z "$stopped" ] || return 1
  say "$name: $*"
  timeout --kill-after=30 $((left > 0 ? left : 1)) "$@" > >(tee -a "$out/logs/$name.log") 2>&1 &
  child=$!
  wait $child
  status=$?
  while kill -0 $child 2>/dev/null; do  # a signal has ended the wait, not the command
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

limit_of() {  # STAGE: its time limit in seconds
  case $1 in llama.cpp-build) echo "$stage_seconds" ;; llama.cpp-*) echo "$llama_seconds" ;; *) echo "$stage_seconds" ;; esac
}

in_words() {  # EXIT STATUS
  case $1 in 0) echo passed ;; 3) echo "passed in part, continues when run again" ;; *) echo "failed (status $1)" ;; esac
}

[ $# -eq 0 ] || stages=("$@")
mkdir -p "$out/done" "$out/logs"
child="" stopped="" worst=0
trap stop INT TERM
: > "$out/stages.txt"
for stage in "${stages[@]}"; do
  if [ -n "$stopped" ]; then
    printf '%-25s%s\n' "$stage" "not begun: stopped" >> "$out/stages.txt"
    continue
  fi
  began=$SECONDS deadline=$((SECONDS + $(limit_of "$stage"))) result=0
  case $stage in
    smoke|profile|peer|pack) $stage ;;
    llama.cpp-build) build_llama ;;
    llama.cpp-profile) profile_llama ;;
    llama.cpp-*) validate_llama "$stage" ;;
    *) validate "$stage" ;;
  esac
  printf '%-25s%4d s  %s\n' "$stage" $((SECONDS - began)) "$(in_words $result)" >> "$out/stages.txt"
  case $result in 0) ;; 3) [ $worst -ne 0 ] || worst=3 ;; *) worst=1 ;; esac
done
echo
cat "$out/stages.txt"
[ -z "$stopped" ] || worst=1
exit $worst
