"""Programmatic dependent launch: the two instructions, usable in kernels and in the interpreter."""

import triton
from triton.language.extra import cuda


@triton.jit
def allow_next():
    """Let the next kernel of the stream be scheduled while this one runs."""
    cuda.gdc_launch_dependents()


@triton.jit
def wait_previous():
    """Wait until all earlier kernels of the stream have finished and their writes are visible."""
    cuda.gdc_wait()


def launch_options(pdl: bool) -> dict[str, bool]:
    """Keyword arguments of a launch. Without ``pdl`` there are none, since the argument exists only
    on NVIDIA."""
    return {"launch_pdl": True} if pdl else {}
