#!/usr/bin/env bash
# Throughput through tritonserver beside the engine's own. In the repository's root, on the GPU
# machine, with .gpu/ packed by `python -m tools.gpu server` (and `kernels`, for FlashAttention-3):
#     tools/gpu/server_share.sh [OPTION of bench server-share ...]
# If the two archives are too much for one transfer, bring the first by sourcing
# tools/gpu/activate.sh, which unpacks it, and the second with this.
source tools/gpu/activate.sh
python=${MINISGL_SERVER_PYTHON:?needs .gpu/server.tar.xz}
model=$MINISGL_GPU_SITE/qwen3-0.6b
"$python" -m minisgl_bench.dummy_model qwen3-0.6b "$model"
timeout 400 "$python" -m minisgl_backend.cli bench server-share \
    --model "$model" --load-format dummy --requests 256 --input-length 100 1024 \
    --output-length 100 1024 --temperature 0.6 --json "${OUT:-.}/server-qwen3-0.6b.json" "$@"
