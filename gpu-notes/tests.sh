source tools/gpu/activate.sh
T="timeout 170 python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -m gpu -v --tb=line -p no:benchmark"
$T -n 4 tests/gpu/test_kernels_quantized.py -k "not odd_sizes" > $OUT/kernels.log 2>&1 &
$T -n 3 tests/gpu/test_quantized_weights.py > $OUT/weights.log 2>&1 &
wait
grep -v PASSED $OUT/kernels.log | cut -c1-300 | tail -40; grep -c PASSED $OUT/kernels.log
grep -v PASSED $OUT/weights.log | cut -c1-300 | tail -40; grep -c PASSED $OUT/weights.log
