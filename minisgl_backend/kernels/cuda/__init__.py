"""The CUDA C++ sources and what compiles and launches them (``module``).

Importing any module here but ``code_cache`` imports ``cuda.bindings``, which comes with torch if
it was built for CUDA. So only code that has a GPU imports them.
"""
