"""Shared memory of a multiprocessor, and how much of it each of its thread blocks can have.

Plain numbers; must not know a device.
"""

from __future__ import annotations

from typing import Final

OF_HOPPER: Final = 228 * 1024
"""Bytes of a multiprocessor of compute capability 9.0."""

_RESERVED: Final = 1024
"""Bytes that CUDA takes for itself in each thread block."""


def most_bytes(of_processor: int, per_processor: int = 1) -> int:
    """The most that a thread block can have, if ``per_processor`` of them are to fit on a
    multiprocessor with ``of_processor`` bytes."""
    return of_processor // per_processor - _RESERVED
