source tools/gpu/activate.sh
M="python3 -m minisgl_backend.cli bench"
$M dummy-model qwen3-14b /tmp/q14; $M dummy-model qwen3-14b /tmp/q14i4 --weights int4-awq
timeout 24 python3 gpu-notes/sweep.py time > $OUT/sweep.log 2>&1; tail -100 $OUT/sweep.log
timeout 34 $M decode --steps 60 --model /tmp/q14i4 --load-format dummy --batch-size 1 --batch-size 64 2>&1 | tail -22
timeout 45 $M decode --steps 60 --model /tmp/q14 --load-format dummy --quantization fp8 --batch-size 1 --batch-size 64 --batch-size 256 2>&1 | tail -22
timeout 40 $M decode --steps 40 --model /tmp/q14 --load-format dummy --quantization fp8 --batch-size 64 --profile /tmp/t64.json 2>&1 | tail -40
timeout 60 $M offline --model /tmp/q14 --load-format dummy --quantization fp8 --requests 256 --input-length 100 1024 --output-length 100 1024 --temperature 0.6 2>&1 | tail -22
