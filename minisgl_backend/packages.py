"""Optional packages, each pinned to one version: how to install them, and what is slower without.

The versions match ``constraints/gpu.txt`` and the CUDA version of its PyTorch. Must not know
tensors or devices.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Final

CUDA_BINDINGS: Final = "pip install cuda-bindings==13.4.4"
FLASH_ATTN: Final = "pip install sglang-kernel==0.4.4"
FLASH_INFER: Final = "pip install flashinfer-python==0.6.12"
FLASH_INFER_KERNELS: Final = (
    "pip install flashinfer-jit-cache==0.6.12 --index-url https://flashinfer.ai/whl/cu130"
)
"""Compiled ahead of time. Must have FlashInfer's version, and is only in its authors' index."""

_SPEEDING: Final = (
    (
        "cuda.bindings",
        (9, 10, 12),
        CUDA_BINDINGS,
        "decoding runs on Triton kernels, and on an H200 a step takes 1.1 to 1.4 times as long",
    ),
    (
        "sgl_kernel.flash_attn",
        (9,),
        FLASH_ATTN,
        "attention to prompts runs on Triton kernels, which use Hopper's tensor cores less well",
    ),
)
"""Modules that ``auto`` uses if they are there: name, major compute capabilities of the GPUs that
gain, command to install it, cost of its absence."""


def import_error(module: str) -> str | None:
    """Import a module; returns the error's text, or None if the import succeeded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some libraries warn when imported
            importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


def slower_without(major: int) -> str | None:
    """One log line about missing packages that a GPU of this major compute capability would use.

    None if none is missing. For each: the package, its error, the cost and the command.
    """
    parts = [
        f"without {module.partition('.')[0]} ({error}) {cost}: {command}"
        for module, majors, command, cost in _SPEEDING
        if major in majors and (error := import_error(module)) is not None
    ]
    return "slower layers: " + "; ".join(parts) if parts else None
