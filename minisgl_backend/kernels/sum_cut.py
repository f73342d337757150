"""How a sum of all ranks' rows is cut into calls of ``cuda.fused_sum``, and by which kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LARGEST_SIZE: Final = 8192
"""The most elements of a row: a thread block has at most 1024 threads, with 8 elements each."""
_ELEMENT_BYTES: Final = 2
_LEAST_SAVED: Final = 2**20
"""If sending sums saves a rank at least this many bytes, it is worth waiting twice."""


def slices(
    num_rows: int, size: int, num_ranks: int, buffer_bytes: int
) -> Iterator[tuple[int, int, bool]]:
    """The first row and the end of each call for rows of ``size`` elements, and whether it takes
    ``two_shot``, in which ranks send sums."""
    others, row_bytes = num_ranks - 1, _ELEMENT_BYTES * size
    saved = num_rows * row_bytes * (others - 2 * others / num_ranks)
    two_shot = saved >= _LEAST_SAVED
    if two_shot:  # the others' rows of this rank's groups, and all sums
        most = buffer_bytes // ((others + num_ranks) * row_bytes) * num_ranks
    else:
        most = buffer_bytes // (others * row_bytes)
    for begin in range(0, num_rows, most):
        yield begin, min(begin + most, num_rows), two_shot
