#!/bin/bash
# Everything that a GPU is asked for first, in about 10 minutes: bash tests/benchmarks/first_gpu_run.sh OUT
# First what needs no GPU to itself, all at once; then what is timed, one after another. No failure stops the rest; every
# step has a time limit. Needs `harness` and pytest-xdist; compute-sanitizer where it is there. Not run yet.
out=$(realpath -m "${1:?a folder for the results}"); mkdir -p "$out"; cd "$(dirname "$0")/../.." || exit
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 PYTHONPATH=$PWD:$PYTHONPATH
schedules=plain,chunked,batched,mixed,prefix-hit,forked,preempted,tensor-parallel
{ date; nvidia-smi; python3 -V; python3 -m pip list; lscpu; } > "$out/environment.txt" 2>&1

timeout 240 python3 -m pytest -n 6 -q -m "gpu and not slow" tests/unit/reference_engine tests/unit/properties \
  > "$out/tests.txt" 2>&1 &
for dtype in float32 bfloat16; do for backend in paged triton; do
  timeout 180 harness check --device cuda --dtype $dtype --schedule $schedules \
    --engine-option attention_backend=$backend > "$out/check-$dtype-$backend.txt" 2>&1 &
done; done
timeout 180 harness profile --device cuda --dtype bfloat16 --engine-option attention_backend=triton \
  --out "$out/profile" > "$out/profile.txt" 2>&1 &
timeout 180 compute-sanitizer --tool memcheck --target-processes all python3 -m pytest -q -x -m gpu \
  tests/unit/reference_engine/fast/kernels/test_paged_decode.py > "$out/sanitizer.txt" 2>&1 &
wait

timeout 150 python3 tests/benchmarks/gpu_kernels.py > "$out/kernels.txt" 2>&1
timeout 120 python3 tests/benchmarks/gpu_steps.py 'decode("qwen3-8b", [1, 16])' 'kernels("qwen3-8b")' \
  'decode("qwen3-8b", [1], fused_kernels=False)' 'decode("qwen3-0.6b", [1, 16, 256])' 'host("qwen3-0.6b")' \
  'workload("qwen3-0.6b")' > "$out/steps.txt" 2>&1
bench="timeout 240 harness bench engine --dtype bfloat16 --device cuda --engine-option attention_backend=triton --repeats 1"
$bench --shape qwen3-0.6b --requests 32 --peer hf-generate > "$out/bench-0.6b.txt" 2>&1
TORCH_CUDNN_SDPA_DEPRIORITIZED=1 $bench --shape qwen3-0.6b --requests 32 --peer hf-generate \
  > "$out/bench-0.6b-without-cudnn.txt" 2>&1
$bench --shape qwen3-8b --requests 16 --peer hf-generate > "$out/bench-8b.txt" 2>&1
$bench --shape qwen3-0.6b --peer hf-continuous > "$out/bench-256.txt" 2>&1
