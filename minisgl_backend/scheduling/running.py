"""The numbers of all sequences that hold a row, as columns: one numpy array each, indexed by row.

Columns make a steady decode step cheap: planning and committing 256 rows takes a few array
operations, and no line of Python runs per request.

Must not know pages, phases or the order of service.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl_backend.cache.kv import Lease
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray, Mask, TokenId
from minisgl_backend.scheduling.sequence import Sequence

_NO_STOP: Final = -2  # pads the table of stop ids; it equals neither a token nor ``plan.NO_TOKEN``
_TAIL: Final = 128  # output tokens of a row that are gathered before they move to ``_parts``


class RunningRows:
    """Columns of the rows 0 .. num_rows - 1.

    The positions of a sequence are counted from 0, over the prompt and then the output:
    - ``computed``: number of leading positions computed by committed steps;
    - ``planned``: number of leading positions computed once all steps in flight are done;
    - ``capacity``: number of leading positions that have a page;
    - ``limit``: number of tokens at which the sequence ends;
    - ``adapter_slots``: slots of adapters, 0 for none;
    - ``keeps_at``: position before which the row's recurrent states are kept next;
    - ``stop_from``: a stop token at this position or later ends the sequence (the sampler chooses
      none earlier: ``kernels.sampling_table``).

    ``in_flight`` counts the steps that were planned with the row and are not committed yet. If the
    row has guesses in these, ``planned`` counts their positions, as if all were right.
    ``decoding`` rows take part in the next decode, ``accepting`` rows take the tokens of commits,
    ``retiring`` rows wait for their last step in flight, and ``masked`` rows have a grammar.
    """

    def __init__(self, num_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_rows
        self.request_ids = np.zeros(num_rows, dtype=np.int64)
        self.planned = np.zeros(num_rows, dtype=np.int32)
        self.computed = np.zeros(num_rows, dtype=np.int32)
        self.capacity = np.zeros(num_rows, dtype=np.int32)
        self.limit = np.zeros(num_rows, dtype=np.int32)
        self.stop_from = np.zeros(num_rows, dtype=np.int32)
        self.keeps_at = np.zeros(num_rows, dtype=np.int32)
        self.adapter_slots = np.zeros(num_rows, dtype=np.int32)
        self.in_flight = np.zeros(num_rows, dtype=np.int32)
        self.decoding = np.zeros(num_rows, dtype=np.bool_)
        self.accepting = np.zeros(num_rows, dtype=np.bool_)
        self.retiring = np.zeros(num_rows, dtype=np.bool_)
        self.masked = np.zeros(num_rows, dtype=np.bool_)
        self._num_stop_ids = np.zeros(num_rows, dtype=np.int32)
        self._stop_ids = np.full((num_rows, 1), _NO_STOP, dtype=np.int32)
        self._tail = np.zeros((num_rows, _TAIL), dtype=np.int32)
        self._tail_length = np.zeros(num_rows, dtype=np.int32)
        self._parts: list[list[IntArray]] = [[] for _ in range(num_rows)]
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows with a sequence."""
        return len(self.sequences) - len(self._free)

    def take(self, sequence: Sequence, num_cached_tokens: int, capacity: int) -> int:
        """Give ``sequence`` a free row, and return it. Its first ``num_cached_tokens`` positions
        count as computed."""
        request = sequence.request
        row = self._free.pop()
        self.sequences[row] = sequence
        self.request_ids[row] = request.id
        self.planned[row] = self.computed[row] = num_cached_tokens
        self.capacity[row] = capacity
        self.limit[row] = sequence.limit
        self.stop_from[row] = len(request.prompt) + request.sampling.min_tokens
        self.adapter_slots[row] = sequence.adapter_slot
        self.accepting[row] = True
        self.masked[row] = request.sampling.grammar is not None
        self._set_stop_ids(row, request.sampling.stop_token_ids)
        return row

    def give_back(self, row: int) -> None:
        """Take the row from its sequence."""
        if self.in_flight[row]:
            raise InvariantError(f"row {row} is given back with steps in flight")
        self.sequences[row] = None
        for column in (self.decoding, self.accepting, self.retiring, self.masked):
            column[row] = False
        self._set_stop_ids(row, ())
        self._tail_length[row] = 0
        self._parts[row] = []
        self._free.append(row)

    def sequence(self, row: int) -> Sequence:
        """The sequence that holds the row. Raises ``InvariantError`` if there is none."""
        sequence = self.sequences[row]
        if sequence is None:
            raise InvariantError(f"row {row} has no sequence")
        return sequence

    def leases(self, rows: IntArray) -> list[Lease]:
        """The leases of the sequences that hold ``rows``, in that order."""
        held = [self.sequences[row] for row in rows.tolist()]
        leases = [sequence.lease for sequence in held if sequence is not None]
        found = [lease for lease in leases if lease is not None]
        if len(found) < len(held):
            raise InvariantError("a row has no sequence, or its sequence no lease")
        return found

    def by_fate(self) -> tuple[list[Sequence], list[Sequence]]:
        """The running and the retiring sequences, both in the order of their rows."""
        held = [sequence for sequence in self.sequences if sequence is not None]
        running = [sequence for sequence in held if not self.retiring[sequence.row]]
        return running, [sequence for sequence in held if self.retiring[sequence.row]]

    def ready_to_decode(self) -> IntArray:
        """Rows with a token to decode, int32[num_ready], ascending."""
        return self.decoding.nonzero()[0].astype(np.int32)

    def by_adapter(self, rows: IntArray) -> IntArray:
        """The same ``rows``, which are ascending, sorted by adapter slot and then by row."""
        slots = self.adapter_slots[rows]
        return rows[np.argsort(slots, kind="stable")] if slots.any() else rows

    def short(self, rows: IntArray) -> set[int]:
        """Those of ``rows`` that cannot decode without one more page."""
        return set(rows[self.planned[rows] >= self.capacity[rows]].tolist())

    def plan_decode(self, rows: IntArray) -> IntArray:
        """Plan one more position for each of ``rows``, and return the positions, int32[num_rows].

        To compute position p is to sample the token at p + 1. If that is the last token that the
        row may have, the row decodes no more.
        """
        positions = self.planned[rows]
        self.planned[rows] = positions + 1
        self.in_flight[rows] += 1
        self.decoding[rows] = positions + 2 < self.limit[rows]
        return positions

    def plan_prefill(self, row: int, end: int) -> None:
        """Plan the positions up to ``end`` of one row."""
        self.planned[row] = end
        self.in_flight[row] += 1

    def plan_guesses(self, row: int, end: int) -> None:
        """Plan the row's last token and guesses, up to the position ``end``; until they are judged
        it does not decode."""
        self.plan_prefill(row, end)
        self.decoding[row] = False

    def go_on_from_guesses(self, row: int, num_wrong: int) -> None:
        """Take back the planned positions whose guesses were wrong, and let the row decode, unless
        it has guesses in a later step, too."""
        self.planned[row] -= num_wrong
        if not self.in_flight[row]:
            self.start_decoding(row)

    def skip(self, row: int, end: int) -> None:
        """Note that the positions up to ``end`` of a row that was just taken need no step."""
        self.planned[row] = self.computed[row] = end

    def start_decoding(self, row: int) -> None:
        """Let the row decode from the next step on, unless the token sampled now is its last."""
        self.decoding[row] = self.planned[row] + 1 < self.limit[row]

    def landed(self, rows: IntArray, ends: IntArray) -> None:
        """Note that a step is committed: the positions of ``rows`` up to ``ends`` are computed."""
        self.in_flight[rows] -= 1
        self.computed[rows] = ends

    def retire(self, row: int, *, still_accepting: bool) -> None:
        """Plan nothing more for the row."""
        self.decoding[row] = False
        self.retiring[row] = True
        self.accepting[row] = still_accepting

    def is_idle(self, rows: IntArray) -> Mask:
        """Which of ``rows`` retire and no longer have a step in flight, bool[num_rows]."""
        return np.asarray(self.retiring[rows] & (self.in_flight[rows] == 0))

    def are_complete(self, rows: IntArray) -> Mask:
        """Which rows had all their tokens even before the newest one, bool[num_rows]."""
        return np.asarray(self.computed[rows] >= self.limit[rows])

    def ends(self, rows: IntArray, token_ids: IntArray) -> tuple[Mask, Mask]:
        """Which rows end with their newest token: by a stop token, and by their length.

        ``token_ids`` is int32[num_rows]; both results are bool[num_rows].
        """
        positions = self.computed[rows]
        is_stop_id = (self._stop_ids[rows] == token_ids[:, None]).any(axis=1)
        stopped = is_stop_id & (positions >= self.stop_from[rows])
        return stopped, positions + 1 >= self.limit[rows]

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Keep one more output token for each of ``rows``, which are all different."""
        lengths = self._tail_length[rows]
        self._tail[rows, lengths] = token_ids
        lengths += 1
        self._tail_length[rows] = lengths
        for row in rows[lengths == _TAIL].tolist():
            self._parts[row].append(self._tail[row].copy())
            self._tail_length[row] = 0

    def take_right(self, row: int, guesses: IntArray, samples: IntArray) -> int:
        """Keep the ``samples`` that the row guessed, up to the first that it did not or that ends
        its sequence, which is not kept; returns their number.

        ``guesses`` int32[n]; ``samples`` int32[n + 1], of which the first is sampled after all
        positions that are computed.
        """
        stop_ids = self.sequence(row).request.sampling.stop_token_ids
        num_right, position = 0, int(self.computed[row])
        for guess, sample in zip(guesses.tolist(), samples.tolist(), strict=False):
            if sample != guess or (sample in stop_ids and position >= self.stop_from[row]):
                break
            num_right, position = num_right + 1, position + 1
        self.computed[row] = position
        begin, end = self._tail_length[row], self._tail_length[row] + num_right
        if end < _TAIL:
            self._tail[row, begin:end] = samples[:num_right]
            self._tail_length[row] = end
        else:
            self._parts[row].append(np.concatenate([self._tail[row, :begin], samples[:num_right]]))
            self._tail_length[row] = 0
        return num_right

    def last_token(self, row: int) -> TokenId:
        """The last committed token of the row's sequence."""
        if length := self._tail_length[row]:
            return int(self._tail[row, length - 1])
        parts = self._parts[row]
        return int(parts[-1][-1] if parts else self.sequence(row).tokens[-1])

    def known(self, row: int) -> IntArray:
        """All tokens of the row's sequence that are committed, int32[num_tokens]."""
        return np.concatenate([self.sequence(row).tokens, self.output(row)])

    def output(self, row: int) -> IntArray:
        """The tokens appended since the row was taken, int32[num_tokens]."""
        return np.concatenate([*self._parts[row], self._tail[row, : self._tail_length[row]]])

    def check(self) -> None:
        """Raise ``InvariantError`` if the columns of a row contradict each other."""
        used = np.array([sequence is not None for sequence in self.sequences])
        if self.num_free != np.count_nonzero(~used) or used[self._free].any():
            raise InvariantError("not exactly the rows without a sequence are free")
        marked = self.decoding | self.accepting | self.retiring | (self.in_flight != 0)
        if (marked & ~used).any() or (self.in_flight < 0).any():
            raise InvariantError("a row without a sequence has something to do")
        if (self.retiring & (self.decoding | (self.in_flight == 0)))[used].any():
            raise InvariantError("a retiring row decodes, or is kept without need")
        is_ahead = (self.in_flight == 0) & (self.computed != self.planned)
        if (is_ahead & used).any():
            raise InvariantError("positions of a row are planned, but not in flight")
        in_order = (self.computed <= self.planned) & (self.planned <= self.capacity)
        if not in_order[used].all():
            raise InvariantError("a row violates computed <= planned <= capacity")

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        """Keep the stop ids of a row, in a table no wider than the taken rows need.

        Each step compares its tokens with all columns of the table.
        """
        self._num_stop_ids[row] = len(stop_ids)
        width = max(1, int(self._num_stop_ids.max()))
        if width != self._stop_ids.shape[1]:
            before = self._stop_ids[:, :width]
            self._stop_ids = np.full((len(before), width), _NO_STOP, dtype=np.int32)
            self._stop_ids[:, : before.shape[1]] = before
        self._stop_ids[row] = _NO_STOP
        self._stop_ids[row, : len(stop_ids)] = stop_ids
