"""Memory for ``empty_words.cuh``, in which thread blocks of a launch hand each other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_EMPTY: Final = -1
"""The bits of a word that has not been written: ``EMPTY`` of the source."""


def empty_words(shape: Sequence[int], device: torch.device) -> Tensor:
    """Empty words: int32 of this shape, each the bits of a float32."""
    return torch.full(tuple(shape), _EMPTY, dtype=torch.int32, device=device)
