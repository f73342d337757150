"""Groups of ranks of which only one is there."""

from __future__ import annotations

from minisgl_backend.parallel.group import OneRank


class LoneRank(OneRank):
    """One of several ranks; its collectives are not used while loading."""

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size
