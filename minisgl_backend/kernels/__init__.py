"""Kernels: each is a function over tensors, with a twin in plain torch that says what it computes.

Most kernels are in Triton (``triton_kernels``). A function takes this path if its input is on a GPU
and Triton can be imported; otherwise, for example on a CPU, it takes its twin. The name of a twin
ends in ``_reference``. A twin gives the same values within rounding, runs anywhere and is the
oracle of the tests. Only sampling has a third implementation, for CPUs alone (``sampling_cpu``).
``cuda`` has kernels in CUDA C++ whose register layout is chosen by hand. They are classes, since
they are compiled for one shape and keep a workspace.

Twins compute in float32, or in float64 if their input is float64, and round once. They do not
convert weights.

Imports go one way: ``cuda``, functions, ``triton_kernels``, then what all of them use (tables,
workspaces, the sampling rule, noise).

Must not know layers, models, requests or plans. Invariants: nothing on the Triton path waits for
the device, reads a value back or allocates by value, so it may be captured in a CUDA graph; tensors
are contiguous in their last dimension; importing this package needs neither a GPU nor Triton.

With ``pdl=True`` a kernel may start before its predecessor on the stream has finished, and then
waits for it itself (programmatic dependent launch). All kernels wait, so each sees all earlier
writes. Before its wait a kernel may read weights. Decode attention of ``kernels.cuda`` also reads
its runs, the page table and the pages, except each row's newest positions, which the step writes.
So the launch right before it must write none of these, and must let it start only when all earlier
launches have ended.
The same holds for experts: before their waits, the second GEMM reads which rows each expert has,
and the sum over experts reads the residual stream, the weights of choices and the gate of a shared
expert.
"""
