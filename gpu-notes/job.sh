source tools/gpu/activate.sh
M="python3 -m minisgl_backend.cli bench"
$M dummy-model qwen3-14b /tmp/q14; $M dummy-model qwen3-14b /tmp/q14i4 --weights int4-awq
for b in 1 16 64 128 256; do for f in fp8 int4; do $M kernels --model qwen3-14b --batch-size $b --only "$f " ; done; done
$M decode --model /tmp/q14 --load-format dummy --batch-size 1 --batch-size 64 --batch-size 256
# the server does not keep quantized weights yet; here it does
sed -i 's/keep_quantized: bool = False/keep_quantized: bool = True/' minisgl_backend/models/build.py
$M decode --model /tmp/q14 --load-format dummy --quantization fp8 --batch-size 1 --batch-size 64 --batch-size 256
$M decode --model /tmp/q14i4 --load-format dummy --batch-size 1 --batch-size 64 --batch-size 256
$M offline --model /tmp/q14 --load-format dummy --quantization fp8 --requests 256
$M offline --model /tmp/q14 --load-format dummy --quantization fp8 --kv-cache-dtype fp8_e4m3 --requests 256
