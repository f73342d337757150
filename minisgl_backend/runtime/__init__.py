"""The running engine: its loop over plans, and ``Engine``, which any thread may call.

Must not know Triton, text or tensors.
"""
