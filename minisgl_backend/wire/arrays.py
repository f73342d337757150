"""Texts and bytes as numpy arrays, in the form in which Triton takes them.

Must not know the name of any value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def texts_array(texts: Sequence[str]) -> npt.NDArray[np.object_]:
    """An array of strings."""
    return np.array([text.encode() for text in texts], dtype=np.object_)


def text_array(text: str) -> npt.NDArray[np.object_]:
    """An array of one string."""
    return texts_array([text])


def bytes_array(data: bytes) -> npt.NDArray[np.uint8]:
    """An array of these bytes."""
    return np.frombuffer(data, dtype=np.uint8)
