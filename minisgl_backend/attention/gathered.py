"""What pages hold, in contiguous memory and in the type of queries, for attention without pages."""

from __future__ import annotations

import torch
from torch import Tensor


def gathered(rows: Tensor, index: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The ``rows`` [num_rows, size] of an ``index`` int[n], [n, size]. Those of float8 have a
    ``scale`` [1], and are read as ``dtype``; others keep their type."""
    if scale is None:
        return rows.index_select(0, index)
    bits = rows.view(torch.uint8).index_select(0, index)  # float8 cannot be indexed
    return (bits.view(rows.dtype).float() * scale).to(dtype)
