#!/usr/bin/env bash
# Profile and validate full-size models on one CUDA GPU, in an estimated ten minutes: examples/full-size.sh OUT
# Experts, attention and heads have their full size and lie in pinned host memory. Of the two larger models the first
# layers are run, so that 64 GB of it are enough. DeepSeek-V2-Lite plays the bundled trace, the others made-up routing.
set -euo pipefail
out=${1:?"expected a folder to write to, as in: examples/full-size.sh docs/validation/my-gpu"}
trilane=${TRILANE:-trilane}
plan="$(dirname "$0")/full-size.yaml"
mkdir -p "$out"

for model in deepseek-v2-lite qwen3-30b-a3b:24 mixtral-8x7b:8; do
  name=${model%%:*}
  $trilane profile -o "$out/profile.yaml" --lanes cuda --memory-gb 24 --quick --model "$model" \
    --batch 1,4 --context 32,64 --prompt 32 --policies fiddler,on-demand,mixtral-offloading,dali,hybrimoe,best-exact
  if [ "$name" = deepseek-v2-lite ]; then
    routing=(--set trace=mini-deepseek)
  else
    $trilane trace synth --like "$model" -o "$out/$name.safetensors" --seed 1
    $trilane trace synth --like "$model" -o "$out/$name-calibration.safetensors" --seed 2
    routing=(--set "trace=$out/$name.safetensors" --set "calibration=$out/$name-calibration.safetensors")
  fi
  $trilane validate "$plan" --profile "$out/profile.yaml" --set "model=$model" "${routing[@]}" --out "$out/$name"
done
