source tools/gpu/activate.sh
M="python3 -m minisgl_backend.cli bench"
$M dummy-model qwen3-14b /tmp/q14 > /dev/null; $M dummy-model qwen3-14b /tmp/q14i4 --weights int4-awq > /dev/null
D="$M decode --steps 60 --load-format dummy --cuda-graph-max-tokens 0"
timeout 20 $D --model /tmp/q14 --quantization fp8 --cuda-graph-batch-sizes 1,64,256 --batch-size 1 --batch-size 64 --batch-size 256 --json $OUT/decode-qwen3-14b-fp8-weights.json 2>&1 | tail -16
timeout 40 $M offline --model /tmp/q14 --load-format dummy --quantization fp8 --requests 256 --input-length 100 1024 --output-length 100 1024 --temperature 0.6 --json $OUT/offline-qwen3-14b-fp8-weights.json 2>&1 | tail -16
timeout 20 $D --model /tmp/q14i4 --cuda-graph-batch-sizes 1,64 --batch-size 1 --batch-size 64 --json $OUT/decode-qwen3-14b-int4-weights.json 2>&1 | tail -16
