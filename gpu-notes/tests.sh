source tools/gpu/activate.sh
(python3 gpu-notes/sweep.py compile > $OUT/compile.log 2>&1; python3 gpu-notes/sweep.py compile paired >> $OUT/compile.log 2>&1) &
T="python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -m gpu -q -p no:benchmark"
$T -n 5 tests/gpu/test_kernels_quantized.py tests/gpu/test_quantized_weights.py tests/gpu/test_kernels_linear.py -k "not paired"
timeout 60 $T -n 3 tests/gpu/test_kernels_quantized.py -k "paired"
wait; cat $OUT/compile.log
