"""Facts about this machine's processor, read from Linux. Must not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

LARGE_MODEL: Final = 10**8
"""Number of weights. A step of a larger model takes so long that planning, tokenizing and sending
cost little in comparison, and most of it is spent reading weights from memory."""

CPU_INFO: Final = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16"})


def has_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16. Without them a GEMM that takes seconds
    in float32 takes minutes."""
    try:
        with CPU_INFO.open(encoding="ascii", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False
    return not _BFLOAT16_FLAGS.isdisjoint(flags.split())


def default_dtype(checkpoint_dtype: str, num_weights: int) -> str:
    """The default type of weights and activations on a CPU.

    It is float32, in which a GEMM's rounding hardly ever changes a token. For large models with
    16-bit checkpoints it is bfloat16 if the processor supports it, since that reads half the bytes
    and is several times as fast.
    """
    is_16_bit = checkpoint_dtype in ("bfloat16", "float16")
    if is_16_bit and num_weights >= LARGE_MODEL and has_bfloat16():
        return "bfloat16"
    return "float32"
