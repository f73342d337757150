source tools/gpu/activate.sh
(sleep 1; python3 gpu-notes/sweep.py compile > $OUT/compile.log 2>&1) &
T="python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -m gpu -q --tb=short -p no:benchmark"
timeout 100 $T -n 5 tests/gpu/test_quantized_weights.py 2>&1 | tail -60
timeout 150 $T -n 5 tests/gpu/test_kernels_quantized.py -k "not odd_sizes" 2>&1 | tail -60
wait; cat $OUT/compile.log
