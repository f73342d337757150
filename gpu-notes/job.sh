source tools/gpu/activate.sh
M="python3 -m minisgl_backend.cli bench"
timeout 40 python3 gpu-notes/sweep.py time > $OUT/sweep.log 2>&1; tail -100 $OUT/sweep.log
timeout 15 python3 gpu-notes/sweep.py time paired > $OUT/sweep2.log 2>&1; tail -20 $OUT/sweep2.log
$M dummy-model qwen3-14b /tmp/q14; $M dummy-model qwen3-14b /tmp/q14i4 --weights int4-awq
time timeout 45 $M decode --model /tmp/q14 --load-format dummy --quantization fp8 --batch-size 1 --batch-size 64 --batch-size 256 2>&1 | tail -25
time timeout 40 $M decode --model /tmp/q14i4 --load-format dummy --batch-size 1 --batch-size 64 2>&1 | tail -25
