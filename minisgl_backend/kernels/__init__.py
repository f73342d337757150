"""Kernels: each a function over tensors, beside a twin in plain torch that says what it computes.

Most are in Triton. ``kernels.cuda`` has those in CUDA C++, where a layout of registers has to be
chosen by hand; they are classes, since they are compiled for one shape and keep a workspace.

A function takes its Triton path (``kernels.jit``) where its input lives on a GPU and Triton can be
imported, else its twin; both give the same values within rounding. Twins end in ``_reference``, run
anywhere and are the oracles of the tests.

Must not know layers, models, requests or plans. Invariants: nothing on the Triton path waits for
the device, reads a value back or allocates by value, so it may be captured in a CUDA graph; tensors
are contiguous in their last dimension; importing this package needs neither a GPU nor Triton.

With ``pdl=True`` a kernel may start before its predecessor on the stream has finished, and waits
for it itself (programmatic dependent launch). All of them wait, so whatever follows finds what was
written before. Ahead of its wait a kernel reads weights, and decode attention of ``kernels.cuda``
also runs, page table and pages, but for each row's newest position: what is launched right before
it writes none of these, and lets it start only when all launches before have ended.
"""
