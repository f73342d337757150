"""The CUDA C++ sources and what compiles and launches them (``module``).

Importing a module here, other than ``code_cache``, imports ``cuda.bindings``, which torch brings if
it was built for CUDA, so only code that has a GPU does it.
"""
