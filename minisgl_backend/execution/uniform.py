"""Random numbers without state: a pure function of a request's seed and a token's position.

So a token does not depend on the rest of the batch, on chunking or on a retraction. A GPU has
others (``kernels.noise``).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from minisgl_backend.attention.base import HostArray

_GOLDEN: Final = np.array([0x9E3779B97F4A7C15], np.uint64)
_FIRST: Final = np.array([0xBF58476D1CE4E5B9], np.uint64)
_SECOND: Final = np.array([0x94D049BB133111EB], np.uint64)


def uniform(seeds: npt.NDArray[np.uint64], positions: HostArray) -> npt.NDArray[np.float32]:
    """A number of [0, 1 - 2^-23] for each pair of seed, uint64[n], and position, int64[n].

    The seed is hashed first, so that nearby seeds give unrelated streams. The position selects a
    number of that stream (SplitMix64: Steele, Lea, Flood, OOPSLA 2014). With only 23 bits, the
    product of the number and a float32 total is always less than the total.
    """
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))
