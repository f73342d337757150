"""A step plan while the scheduler makes it.

Knows the parts of a ``StepPlan``. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.plan import (
    NO_GROUPS,
    NO_HOST_COPIES,
    TO_SAMPLE,
    AdapterMoves,
    Admission,
    Checks,
    Copies,
    Decodes,
    Grants,
    Groups,
    HostCopies,
    PromptChunks,
    Scores,
    Snapshots,
    StepPlan,
)
from minisgl_backend.request import EMPTY, Adapter, IntArray, Mask, TokenId


class Draft:
    """Gathers what a step does; ``budget`` is the number of tokens of chunks and checks that still
    fit. ``assumes_right``: see ``StepPlan``."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.decodes = Decodes()
        self.groups = NO_GROUPS
        self.mtp_rows = EMPTY
        self.assumes_right = False
        self._admissions: list[Admission] = []
        self._grants: list[tuple[IntArray, IntArray, IntArray]] = []
        self._host_loads: list[tuple[int, int]] = []
        self._window_loads: list[tuple[int, int]] = []
        self._state_loads: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int, int]] = []
        self._checks: list[tuple[int, int, int]] = []
        self._checked_tokens: list[IntArray] = []
        self._chunks: list[tuple[int, int, int, int]] = []
        self._begun_from: list[int] = []
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
        return not (self._checks or self._chunks or len(self.decodes.rows))

    @property
    def sample_rows(self) -> IntArray:
        """The rows that get a token, each once, in the order of ``StepPlan.sample_rows``."""
        of_checks = [row for row, _, _ in self._checks]
        of_chunks = [row for row, _, _, next_token in self._chunks if next_token == TO_SAMPLE]
        return np.concatenate([np.array(of_checks + of_chunks, np.int32), self.decodes.rows])

    def admit(self, admission: Admission) -> None:
        """Add a request that takes a row."""
        self._admissions.append(admission)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Let a slot take an adapter."""
        self._loads.append((slot, adapter.id, adapter.facts.rank, adapter.facts.targets))

    def adapt(self, row: int, slot: int) -> None:
        """Let a row have the adapter in a slot, 0 for none."""
        self._adapted.append((row, slot))

    def grant(self, rows: IntArray, indices: IntArray, pages: IntArray) -> None:
        """Add grants: page_table[rows[i], indices[i]] = pages[i]."""
        self._grants.append((rows, indices, pages))

    def grant_row(self, row: int, indices: range, pages: IntArray) -> None:
        """Add grants to one row: page_table[row, indices[i]] = pages[i]."""
        self.grant(np.full(len(indices), row), np.arange(indices.start, indices.stop), pages)

    def load_pages(self, pages: Sequence[int], slots: IntArray) -> None:
        """Fill pages from slots of main memory."""
        self._host_loads += zip(pages, slots.tolist(), strict=True)

    def load_window_pages(self, window_pages: IntArray, window_slots: IntArray) -> None:
        """Fill window pages from window slots of main memory."""
        self._window_loads += zip(window_pages.tolist(), window_slots.tolist(), strict=True)

    def load_states(self, snapshot: int, state_slot: int) -> None:
        """Fill a snapshot from a state slot of main memory."""
        self._state_loads.append((snapshot, state_slot))

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of page ``source`` to page ``target``."""
        self._copies.append((source, target, length))

    def check(self, row: int, start: int, tokens: IntArray) -> None:
        """Let a row decode with guesses: compute ``tokens``, its last one and the guesses, at the
        positions from ``start`` on."""
        self._checks.append((row, start, len(tokens)))
        self._checked_tokens.append(tokens)
        self.budget -= len(tokens)

    def chunk(
        self, row: int, start: int, tokens: IntArray, *, next_token: TokenId, snapshot: int
    ) -> None:
        """Add a chunk: compute ``tokens`` at the positions from ``start`` on; ``next_token`` comes
        after them, or one is sampled if it is ``TO_SAMPLE``. The row begins with ``snapshot``, or
        goes on if it is ``NO_SNAPSHOT``."""
        self._chunks.append((row, start, len(tokens), next_token))
        self._begun_from.append(snapshot)
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
        """Score positions of the chunk added last, from ``start`` on; ``tokens`` are those after
        them."""
        self._scores.append((len(self._chunks) - 1, start, len(tokens)))
        self._score_tokens.append(tokens)

    def decode(self, decodes: Decodes, groups: Groups) -> None:
        """Decode these rows, with groups of them. The arrays are kept, so the caller must not write
        to them again."""
        self.decodes = decodes
        self.groups = groups

    def guess_next(self, rows: IntArray) -> None:
        """Let the MTP layer guess at the next tokens of these rows, of those that get a token."""
        self.mtp_rows = rows

    def freeze(
        self,
        step: int,
        *,
        released_rows: list[int],
        broken_pages: IntArray,
        masked: Mask,
        windows: WindowPages | None = None,
        host: HostCache | None = None,
    ) -> StepPlan:
        """The finished plan, which shares no memory with anything that will change.

        ``masked``, bool[num_rows], says which rows have a grammar. ``windows`` gives its
        broken pages and its grants, ``host`` what is to be saved.
        """
        rows, starts, lengths = _columns(self._checks, 3)
        checks = Checks(rows, starts, lengths, _joined(self._checked_tokens))
        rows, starts, lengths, next_tokens = _columns(self._chunks, 4)
        chunks = PromptChunks(rows, starts, lengths, next_tokens, _joined(self._tokens))
        of, begins, counts = _columns(self._scores, 3)
        scores = Scores(of, begins, counts, _joined(self._score_tokens))
        sampling = self.sample_rows
        begun_from = np.array(self._begun_from, dtype=np.int32)
        loads = NO_HOST_COPIES
        of_kinds = self._host_loads, self._window_loads, self._state_loads
        if any(of_kinds):
            loads = HostCopies(*(it for of_kind in of_kinds for it in _columns(of_kind, 2)))
        return StepPlan(
            step=step,
            released_rows=np.array(released_rows, dtype=np.int32),
            host_saves=NO_HOST_COPIES if host is None else host.take_saves(),
            broken_pages=broken_pages,
            broken_window_pages=EMPTY if windows is None else windows.take_broken(),
            adapters=AdapterMoves(*_columns(self._loads, 4), *_columns(self._adapted, 2)),
            host_loads=loads,
            copies=Copies(*_columns(self._copies, 3)),
            admissions=tuple(self._admissions),
            grants=Grants(*map(_joined, zip(*self._grants, strict=True))),
            window_grants=Grants() if windows is None else windows.take_grants(),
            snapshots=Snapshots(begun_from, *_columns(self._saved, 3), *_columns(self._kept, 2)),
            checks=checks,
            chunks=chunks,
            decodes=self.decodes,
            groups=self.groups,
            scores=scores,
            mtp_rows=self.mtp_rows,
            masked_rows=sampling[masked[sampling]],
            assumes_right=self.assumes_right,
        )


def _columns(lines: Sequence[tuple[int, ...]], width: int) -> Sequence[IntArray]:
    """The columns of a table, int32[num_lines] each."""
    return list(np.array(lines, dtype=np.int32).T) if lines else (EMPTY,) * width


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate(parts, dtype=np.int32) if parts else EMPTY
