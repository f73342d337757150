"""How ``sdpa`` cuts the queries of a step into blocks, and which blocks it pads together.

A *run* is a row's part of the step: a chunk, or one decoded token. Pure arithmetic on the host.
Must not know pages, or how attention is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from minisgl_backend.device.base import HostArray

_MAX_MASK_ELEMENTS: Final = 2**21
_MAX_GATHERED_POSITIONS: Final = 2**18
_FREE_PADDING: Final = 2**16
"""Number of scores that take less time to compute than one more call of SDPA does."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of queries; int64[num_blocks] each.

    ``runs``: the index of the block's run; ``tokens``: the flat index of its first token;
    ``lengths``: its number of queries; ``ends``: the end of their context.
    """

    runs: HostArray
    tokens: HostArray
    lengths: HostArray
    ends: HostArray

    @classmethod
    def of_runs(
        cls, offsets: HostArray, lengths: HostArray, ends: HostArray, heads_per_kv: int
    ) -> Blocks:
        """Each run as one block, or as several if its mask would be too large.

        Per run: its first flat token, its number of queries, and the end of its context.
        """
        most = np.maximum(_MAX_MASK_ELEMENTS // (heads_per_kv * ends), 1)
        whole = cls(np.arange(len(ends)), offsets, lengths, ends)
        if (lengths <= most).all():
            return whole
        counts = -(-lengths // most)
        runs = np.repeat(np.arange(len(ends)), counts)
        index = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)  # in its run
        begins = index * most[runs]  # [num_blocks], the queries of the run before the block
        of_blocks = np.minimum(most[runs], lengths[runs] - begins)
        block_ends = (ends - lengths)[runs] + begins + of_blocks
        return cls(runs, offsets[runs] + begins, of_blocks, block_ends)

    def groups(self, heads_per_kv: int) -> list[Blocks]:
        """Blocks to be padded together: single queries are kept apart from longer runs, and there
        is little padding."""
        single = self.lengths == 1
        found = []
        for kind in (~single, single):
            members = np.flatnonzero(kind)
            if len(members):
                found += self._split(members, heads_per_kv)
        return found

    def _split(self, members: HostArray, heads_per_kv: int) -> list[Blocks]:
        if _fits(self.lengths[members], self.ends[members], heads_per_kv):
            return [self._take(members)]
        order = members[np.lexsort((self.ends[members], self.lengths[members]))]
        borders = [0]
        for i in range(1, len(order)):
            group = order[borders[-1] : i + 1]
            if not _fits(self.lengths[group], self.ends[group], heads_per_kv):
                borders.append(i)
        borders.append(len(order))
        return [self._take(order[begin:end]) for begin, end in pairwise(borders)]

    def _take(self, index: HostArray) -> Blocks:
        return Blocks(self.runs[index], self.tokens[index], self.lengths[index], self.ends[index])


def _fits(lengths: HostArray, ends: HostArray, heads_per_kv: int) -> bool:
    """Whether padding these blocks into one segment wastes little and keeps its tensors small."""
    if len(lengths) == 1:
        return True
    longest, end = int(lengths.max()), int(ends.max())
    positions = len(lengths) * end
    scores = positions * longest
    # The mask of single queries is broadcast over a KV head's heads; other masks are repeated.
    mask_elements = scores * heads_per_kv if longest > 1 else scores
    return (
        positions <= _MAX_GATHERED_POSITIONS
        and mask_elements <= _MAX_MASK_ELEMENTS
        and scores <= 2 * int((lengths * ends).sum()) + _FREE_PADDING
    )
