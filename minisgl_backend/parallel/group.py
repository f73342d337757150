"""The ranks that share one model (``Group``), as the rest of the engine sees them.

Knows rank, size and the collectives that tensor parallelism needs. Must not know models, plans or
how processes are started. Every rank calls the same collectives in the same order, all of them in
the device's queue. So a collective that waits for a silent rank holds up everything queued after
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError

_MOST_UNEVEN_SHARE: Final = 0.05
_MOST_UNEVEN_BYTES: Final = 2 * 2**30
"""The free memory of two ranks may differ by the larger of this share and these bytes. Rank 0's may
be in a process that had engines before: their kernels and buffers stay, more than 1 GiB after an
engine of two ranks."""


class FusedSum(Protocol):
    """All-reduce, residual add and RMSNorm in one kernel."""

    def fits(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for such tensors that is faster than separate kernels."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
    ) -> Tensor:
        """residual += the sum of every rank's ``x``, in place. Returns the RMSNorm of that.

        ``x``, ``residual`` [num_tokens, hidden_size] for which ``fits``; ``weight`` [hidden_size].
        ``pdl``: the kernel may start before its predecessor ends, and its successor may start
        before it ends. It may read ``residual`` before it waits for its predecessor, so the
        predecessor must not let it start until ``residual`` has been written.
        """

    def let_go(self) -> None:
        """End kernels that wait for a lost rank. Does not wait. Idempotent."""


class Group(Protocol):
    """Ranks 0 .. size - 1. A collective whose ranks are lost raises ``EngineFailure``."""

    @property
    def rank(self) -> int:
        """This process's number in the group."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def fused(self) -> FusedSum | None:
        """The kernel for sum over the ranks, residual add and norm; None if there is none."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's ``x``; may overwrite it."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's ``x``, [size, *shape of x]."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's ``x``; overwrites that of the other ranks."""

    def least(self, numbers: Sequence[int]) -> list[int]:
        """The elementwise minimum of all ranks' ``numbers``. Waits for all ranks."""

    def leave(self, *, patience_s: float = 0.0) -> None:
        """Give the group up, on any thread. Collectives end, even those that wait for a lost rank.

        Waits at most ``patience_s`` for this to finish, which it cannot before the CUDA graphs that
        hold collectives are destroyed. Idempotent.
        """


class OneRank:
    """The group of a model on a single device: collectives change nothing."""

    rank = 0
    size = 1
    fused: FusedSum | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def least(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)

    def leave(self, *, patience_s: float = 0.0) -> None:
        pass


def least_free_memory(group: Group, free_bytes: int, *, may_differ: bool = False) -> int:
    """The minimum of all ranks' free bytes, so that all ranks make the same number of pages.

    Unless they ``may_differ``, raises ``ConfigError`` if they are more than 5 % of the most, and
    more than 2 GiB, apart: the rank with the least free memory would limit all others, and most
    likely something else is running on its device.
    """
    least, negated_most = group.least([free_bytes, -free_bytes])
    most = -negated_most
    allowed = max(_MOST_UNEVEN_SHARE * most, _MOST_UNEVEN_BYTES)
    if not may_differ and most - least > allowed:
        raise ConfigError(
            f"the ranks' free memory differs by more than {allowed / 2**30:.1f} GiB: from "
            f"{least / 2**30:.1f} to {most / 2**30:.1f} GiB, "
            f"{free_bytes / 2**30:.1f} GiB on rank {group.rank}"
        )
    return least
