#!/usr/bin/env bash
# A short run of the engine under compute-sanitizer's memcheck. In the repository's root, on the GPU
# machine, with .gpu/ packed by `python -m tools.gpu kernels`:
#     tools/gpu/memcheck.sh [OPTION of bench offline ...]
# The demo model's shape with random weights, 8 requests, twice: with CUDA graphs; and without them,
# each tensor in an allocation of its own, so that what is read or written beyond one is seen.
source tools/gpu/activate.sh
if ! type compute-sanitizer > /dev/null 2>&1; then
    echo "there is no compute-sanitizer on this machine"
    exit 0
fi

run=(python3 -m minisgl_backend.cli bench offline
    --load-format dummy --requests 8 --input-length 5 90 --output-length 4 12 --temperature 0.6
    --num-pages 128 --max-sequence-length 256 --max-running-requests 16 "$@")
graphs=(--cuda-graph-batch-sizes 1,2,4,8)
# CUDA's Python bindings ask the driver for names that it may not know: no error of ours
sanitizer=(timeout 280 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9
    --print-limit 20)
failed=0

echo "== once without the sanitizer, which compiles the kernels"
"${run[@]}" "${graphs[@]}" || exit 1
echo "== CUDA graphs"
"${sanitizer[@]}" "${run[@]}" "${graphs[@]}" || failed=1
echo "== no graphs, an allocation a tensor"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "${sanitizer[@]}" "${run[@]}" --cuda-graph-max-batch-size 0 || failed=1
exit $failed
