"""Keys of prefixes: 64 bits over a salt and all tokens of a prefix of whole pages.

If two prefixes happen to have the same key, a request may go to a replica that has less of its
prompt than expected; nothing else goes wrong. Must not know where prefixes are.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_backend.request import IntArray

Keys: TypeAlias = "npt.NDArray[np.uint64]"
"""The keys of a prompt's prefixes of 1, 2, ... pages."""
Replicas: TypeAlias = int
"""A set of replicas, a bit for each."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTORS: Final = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS: Final = np.uint64(30), np.uint64(27), np.uint64(31)


class PrefixKeys:
    """Computes keys for pages of ``page_size`` tokens.

    The key of a prefix is the sum, modulo 2^64, of a number for the salt and one for each page: the
    weighted sum of its tokens, times an odd number for the page's place. It is linear, so that it
    costs few operations; all weights are fixed odd numbers of 64 random bits.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        weights = _odd_numbers(page_size + 1)
        self._weights, self._start = weights[:-1], weights[-1]
        self._places = np.empty(0, np.uint64)

    def of(self, tokens: IntArray, salt: str) -> Keys:
        """uint64 [len(tokens) // page_size]; ``tokens`` int32 [num_tokens]."""
        num_pages = len(tokens) // self.page_size
        pages = tokens[: num_pages * self.page_size].reshape(num_pages, self.page_size)
        contents = pages.astype(np.uint64) @ self._weights  # [num_pages], modulo 2^64
        contents += self._start  # so that every page counts
        if num_pages > len(self._places):
            self._places = _odd_numbers(self.page_size + 1 + 2 * num_pages)[self.page_size + 1 :]
        contents *= self._places[:num_pages]
        keys: Keys = contents.cumsum()
        if salt:
            keys += _of_salt(salt)
        return keys


def _odd_numbers(count: int) -> Keys:
    """The first ``count`` numbers of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), made odd."""
    x = _STEP * np.arange(1, count + 1, dtype=np.uint64)
    x = (x ^ (x >> _SHIFTS[0])) * _FACTORS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _FACTORS[1]
    odd: Keys = x ^ (x >> _SHIFTS[2]) | np.uint64(1)
    return odd


def _of_salt(salt: str) -> np.uint64:
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
