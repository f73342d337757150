source tools/gpu/activate.sh
python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -m gpu -q -p no:benchmark -n 6 tests/gpu/test_kernels_quantized.py tests/gpu/test_quantized_weights.py tests/gpu/test_kernels_linear.py
