"""A step plan while the scheduler makes it.

Knows the fields of ``StepPlan``. Must not decide anything.
"""

from __future__ import annotations

import numpy as np

from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.plan import NO_GROUPS, Admission, Groups, StepPlan
from minisgl_backend.request import EMPTY, Adapter, IntArray
from minisgl_backend.scheduling.running import Mask


class Draft:
    """Gathers what a step does; ``budget`` is the number of prompt tokens that still fit."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decode_rows = EMPTY
        self.decode_positions = EMPTY
        self.groups = NO_GROUPS
        self._admissions: list[Admission] = []
        self._grants: list[tuple[IntArray, IntArray, IntArray]] = []
        self._copies: list[tuple[int, int, int]] = []
        self._chunks: list[tuple[int, int, int, int, int]] = []
        self._tokens: list[IntArray] = []
        self._saved: list[tuple[int, int, int]] = []
        self._kept: list[tuple[int, int]] = []
        self._scores: list[tuple[int, int, int]] = []
        self._score_tokens: list[IntArray] = []
        self._loads: list[tuple[int, int, int, int]] = []
        self._adapted: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether the step would compute nothing."""
        return not self._chunks and not len(self.decode_rows)

    def admit(self, admission: Admission) -> None:
        """Add a request that takes a row."""
        self._admissions.append(admission)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Let a slot take an adapter."""
        self._loads.append((slot, adapter.id, adapter.rank, adapter.targets))

    def adapt(self, row: int, slot: int) -> None:
        """Let a row have the adapter in a slot, 0 for none."""
        self._adapted.append((row, slot))

    def grant(self, rows: IntArray, indices: IntArray, pages: IntArray) -> None:
        """Add grants: page_table[rows[i], indices[i]] = pages[i]."""
        self._grants.append((rows, indices, pages))

    def grant_row(self, row: int, indices: range, pages: IntArray) -> None:
        """Add grants to one row: page_table[row, indices[i]] = pages[i]."""
        self.grant(np.full(len(indices), row), np.arange(indices.start, indices.stop), pages)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of page ``source`` to page ``target``."""
        self._copies.append((source, target, length))

    def prefill(
        self, row: int, start: int, tokens: IntArray, *, samples: bool, snapshot: int
    ) -> None:
        """Add a chunk: compute ``tokens`` at the positions from ``start`` on. The row begins with
        ``snapshot``, or goes on if it is ``NO_SNAPSHOT``."""
        self._chunks.append((row, start, len(tokens), samples, snapshot))
        self._tokens.append(tokens)
        self.budget -= len(tokens)

    def save(self, position: int, snapshot: int) -> None:
        """Keep the states after the first ``position`` tokens, as the chunk added last computes
        them, as ``snapshot``."""
        self._saved.append((len(self._chunks) - 1, position, snapshot))

    def keep(self, row: int, snapshot: int) -> None:
        """Keep the states with which a decoding row begins the step as ``snapshot``."""
        self._kept.append((row, snapshot))

    def score(self, start: int, tokens: IntArray) -> None:
        """Score positions of the chunk added last, from ``start`` on; ``tokens`` stand after
        them."""
        self._scores.append((len(self._chunks) - 1, start, len(tokens)))
        self._score_tokens.append(tokens)

    def decode(self, rows: IntArray, positions: IntArray, groups: Groups) -> None:
        """Decode these rows, with groups of them. The arrays are kept, so the caller must not write
        to them again."""
        self.decode_rows = rows
        self.decode_positions = positions
        self.groups = groups

    def freeze(
        self,
        step: int,
        *,
        released_rows: list[int],
        broken_pages: IntArray,
        masked: Mask,
        windows: WindowPages | None = None,
    ) -> StepPlan:
        """The finished plan, which shares no memory with anything that will change.

        ``masked``, bool[num_rows], says which rows have a grammar. ``windows`` gives its news.
        """
        chunks = np.array(self._chunks, dtype=np.int32).reshape(-1, 5).T
        copies = np.array(self._copies, dtype=np.int32).reshape(-1, 3).T
        saved = np.array(self._saved, dtype=np.int32).reshape(-1, 3).T
        kept = np.array(self._kept, dtype=np.int32).reshape(-1, 2).T
        scores = np.array(self._scores, dtype=np.int32).reshape(-1, 3).T
        loads = np.array(self._loads, dtype=np.int32).reshape(-1, 4).T
        adapted = np.array(self._adapted, dtype=np.int32).reshape(-1, 2).T
        grant_rows, grant_indices, grant_pages = (
            (_join(column) for column in zip(*self._grants, strict=True))
            if self._grants
            else (EMPTY, EMPTY, EMPTY)
        )
        window_rows, window_indices, window_pages = (
            (EMPTY, EMPTY, EMPTY) if windows is None else windows.take_grants()
        )
        sampled = np.concatenate([chunks[0][chunks[3] != 0], self.decode_rows])
        return StepPlan(
            step=step,
            released_rows=np.array(released_rows, dtype=np.int32),
            broken_pages=broken_pages,
            admissions=tuple(self._admissions),
            grant_rows=grant_rows,
            grant_indices=grant_indices,
            grant_pages=grant_pages,
            copy_sources=copies[0],
            copy_targets=copies[1],
            copy_lengths=copies[2],
            prefill_rows=chunks[0],
            prefill_starts=chunks[1],
            prefill_lengths=chunks[2],
            prefill_samples=chunks[3],
            prefill_tokens=_join(self._tokens) if self._tokens else EMPTY,
            begun_from=chunks[4],
            saved_chunks=saved[0],
            saved_positions=saved[1],
            saved_snapshots=saved[2],
            kept_rows=kept[0],
            kept_snapshots=kept[1],
            decode_rows=self.decode_rows,
            decode_positions=self.decode_positions,
            group_sizes=self.groups.sizes,
            group_begins=self.groups.begins,
            group_ends=self.groups.ends,
            group_rows=self.groups.members,
            masked_rows=sampled[masked[sampled]],
            score_chunks=scores[0],
            score_starts=scores[1],
            score_lengths=scores[2],
            score_tokens=_join(self._score_tokens) if self._score_tokens else EMPTY,
            load_slots=loads[0],
            load_adapters=loads[1],
            load_ranks=loads[2],
            load_targets=loads[3],
            adapter_rows=adapted[0],
            adapter_slots=adapted[1],
            window_rows=window_rows,
            window_indices=window_indices,
            window_pages=window_pages,
            broken_window_pages=EMPTY if windows is None else windows.take_broken(),
        )


def _join(parts: tuple[IntArray, ...] | list[IntArray]) -> IntArray:
    return np.concatenate(parts, dtype=np.int32)
