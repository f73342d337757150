"""The ranks that share one model, as seen by a layer.

Knows rank, size and the two collectives that tensor-parallel layers need. Must not know models,
plans or how processes are started.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks 0 .. size - 1; every rank calls the same collectives in the same order."""

    @property
    def rank(self) -> int:
        """This process's number in the group."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``; may overwrite it."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Every rank's ``x`` side by side along ``dim``, in rank order."""


class OneRank:
    """The group of a model that sits on one device: collectives return what they are given."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x
