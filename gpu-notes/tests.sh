source tools/gpu/activate.sh
(sleep 1; python3 gpu-notes/sweep.py compile > $OUT/compile.log 2>&1) &
T="python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -m gpu -q --tb=short -p no:benchmark"
timeout 80 $T -n 4 tests/gpu/test_quantized_weights.py -k "kept or quantizing" 2>&1 | tail -60
timeout 60 $T -n 4 tests/gpu/test_kernels_quantized.py -k "copies" 2>&1 | tail -40
timeout 120 $T -n 4 tests/gpu/test_kernels_quantized.py -k "not odd_sizes and not copies" 2>&1 | tail -60
wait; cat $OUT/compile.log
