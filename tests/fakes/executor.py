"""An executor without a model: a wrong page in its KV cache gives a wrong token.

The KV of a position is a number computed from its token and all KV before it, read back through the
page table; the next token is computed from all of it. So a page that is wrong, stale, shared by
mistake or written by two rows gives a wrong token, as in a model. Rows of a group read their shared
pages where the group's first row has them. ``expected_tokens`` is what a request must get: the same
arithmetic on plain lists, without pages, rows or steps.

The KV of a position may be NaN. As in attention, which multiplies masked positions by 0, NaN
anywhere in a page that a row reads turns the result into NaN, even at positions that an earlier
request left and this one never wrote. Only ``StepPlan.broken_pages`` clears it.

Layers with windows may have their own pages: the same numbers, kept in window pages and read back
through their table as far as a window reaches. The result is wrong if they differ from those of the
other layers, and NaN if any window page in a row's line of the table has NaN.

Main memory keeps copies of pages, window pages and states, each by slots of its own. What may hold
NaN must not get there.

Rows may have recurrent states, too: all KV so far, carried from step to step and not read through
the page table. A token is wrong if the two differ. States stay as they are in a step with guesses,
and are settled by the next step with the row.

An MTP layer guesses right or wrong by a rule of the ``Model``. Its passes leave a wrong number in
the KV of the positions after the row's: if a page there is another row's, too, that finds it. The
guesses stay with the row up to the next step with it, which alone may check them.

Steps run as late as possible: at ``Pending.tokens``, in launch order. A plan that shares memory
with the planner's state would have changed by then. The arrays of each plan are encoded and decoded
first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, takewhile

import numpy as np
import numpy.typing as npt

from minisgl_backend.plan import (
    LAST_TOKEN,
    MTP_GUESS,
    NO_SNAPSHOT,
    NO_TOKEN,
    TO_SAMPLE,
    WHOLE_EVERY,
    Admission,
    Copies,
    Grants,
    HostCopies,
    SampledTokens,
    StepPlan,
    decode_plan,
    encode_plan,
)
from minisgl_backend.request import (
    IntArray,
    PromptLogprobs,
    Request,
    SamplingParams,
    TokenLogprobs,
)

_MASK = 2**64 - 1
_POISON = 0xDEAD_BEEF


@dataclass(frozen=True, slots=True)
class Model:
    """Token arithmetic over a vocabulary.

    One in ``nan_every`` samples is not finite, and the KV of one in ``nan_kv_every`` positions is
    NaN (0: none); the same tokens before a position always give the same result.
    ``mtp_right_of`` (n, m): n of m guesses of the MTP layer are right.
    """

    vocabulary: int = 1000
    nan_every: int = 0
    nan_kv_every: int = 0
    mtp_right_of: tuple[int, int] = (2, 3)

    def kv(self, token: int, position: int, context: int) -> int:
        """The KV of a token that comes after a context."""
        return _mix(_mix(token + 1, position), context)

    def is_nan(self, kv: int) -> bool:
        """Whether a model would have computed NaN for this position."""
        return self.nan_kv_every > 0 and (kv >> 8) % self.nan_kv_every == 0

    def sample(
        self, context: int, index: int, params: SamplingParams, history: tuple[int, ...]
    ) -> int:
        """The output token at that index; ``history``, all tokens so far, counts with penalties."""
        bits = _mix(context, params.seed)
        if params.has_penalties:
            bits = _mix(bits, hash(history) & _MASK)
        if self.nan_every and bits % self.nan_every == 0:
            return NO_TOKEN
        token = (bits >> 8) % self.vocabulary
        while index < params.min_tokens and token in params.stop_token_ids:
            token = (token + 1) % self.vocabulary
        return token

    def mtp_guess(
        self, context: int, index: int, params: SamplingParams, history: tuple[int, ...]
    ) -> int:
        """What the MTP layer guesses that ``sample`` gives."""
        token = self.sample(context, index, params, history)
        num_right, num_all = self.mtp_right_of
        is_right = _mix(context, params.seed + 1) % num_all < num_right
        return token if is_right and token != NO_TOKEN else (token + 1) % self.vocabulary

    def logprob(self, token: int, context: int) -> float:
        """The log-probability of a prompt token after a context, a number that fits in float32."""
        return -float(_mix(context, token) >> 48)


def expected_prompt_logprobs(request: Request, model: Model) -> list[float]:
    """The log-probabilities of all prompt tokens except the first; empty if not requested."""
    context = 0
    found: list[float] = []
    if request.sampling.num_prompt_logprobs is None:
        return found
    for position, (token, behind) in enumerate(pairwise(request.prompt.tolist())):
        context = _add(context, model.kv(token, position, context), position)
        found.append(model.logprob(behind, context))
    return found


def expected_tokens(request: Request, model: Model) -> list[int]:
    """The tokens that the request gets, NO_TOKEN included, whatever else is served with it."""
    params = request.sampling
    tokens: list[int] = request.prompt.tolist()
    num_prompt_tokens = len(tokens)
    context = position = 0
    has_nan = False
    while True:
        for token in tokens[position:]:
            kv = model.kv(token, position, context)
            has_nan |= model.is_nan(kv)
            context = _add(context, kv, position)
            position += 1
        index = len(tokens) - num_prompt_tokens
        token = NO_TOKEN if has_nan else model.sample(context, index, params, tuple(tokens))
        if params.max_tokens == 0:
            return [NO_TOKEN] if token == NO_TOKEN else []
        tokens.append(token)
        stopped = token in params.stop_token_ids and index >= params.min_tokens
        if stopped or token == NO_TOKEN or index + 1 >= params.max_tokens:
            return tokens[num_prompt_tokens:]


@dataclass(frozen=True, slots=True)
class _State:
    """The recurrent state of a row, or a snapshot of it."""

    context: int = 0
    has_nan: bool = False
    position: int = 0


@dataclass(slots=True)
class _Row:
    admission: Admission
    history: list[int]
    computed: int
    last_token: int = NO_TOKEN
    state: _State = _State()
    later: list[_State] = field(default_factory=list)  # after each token that it has not taken in
    mtp_guesses: list[int] = field(default_factory=list)  # made by the last step with the row


@dataclass(slots=True)
class FakePending:
    """A launched step that has not run yet."""

    executor: FakeExecutor
    plan: StepPlan
    result: SampledTokens | None = None

    def masks(self, num_masks: int) -> IntArray:
        """The arithmetic knows no masks."""
        return np.empty((num_masks, 0), np.int32)

    def mask(self, samples: IntArray) -> None:
        pass

    def tokens(self) -> SampledTokens:
        """Run all steps up to this one."""
        while self.result is None:
            self.executor.run_next()
        return self.result


@dataclass(slots=True)
class FakeExecutor:
    """Runs plans on numbers; an ``Executor`` of ``runtime.ports``.

    ``is_hit`` says whether a fault turns the position that is computed now into NaN, whatever its
    tokens. There is memory for the updates of ``most_unsettled`` rows. The MTP layer guesses
    ``mtp_tokens`` for a row. ``num_cleared`` counts the
    broken pages of all plans, ``num_kept`` the states of decoding rows that were kept,
    ``num_loaded`` the pages that came from main memory, ``num_states_loaded`` the states and
    ``num_windows_loaded`` the window pages.
    """

    num_pages: int
    page_size: int
    max_sequence_length: int
    model: Model = field(default_factory=Model)
    num_rows: int = 64
    has_states: bool = False
    most_unsettled: int = 0
    window: int | None = None
    num_window_pages: int = 0
    mtp_tokens: int = 0
    is_hit: Callable[[], bool] = lambda: False
    num_cleared: int = 0
    num_kept: int = 0
    num_loaded: int = 0
    num_states_loaded: int = 0
    num_windows_loaded: int = 0
    _kv: npt.NDArray[np.uint64] = field(init=False)  # [num_pages, page_size]
    _is_nan: npt.NDArray[np.bool_] = field(init=False)  # [num_pages, page_size]
    _page_table: npt.NDArray[np.int64] = field(init=False)  # [num_rows, pages of a sequence]
    _read_at: npt.NDArray[np.int64] = field(init=False)  # the table of this step, by groups
    _weights: npt.NDArray[np.uint64] = field(init=False)  # [positions]
    _window_kv: npt.NDArray[np.uint64] = field(init=False)  # [num_window_pages + 1, page_size]
    _window_is_nan: npt.NDArray[np.bool_] = field(init=False)  # the last is the dummy page
    _window_table: npt.NDArray[np.int64] = field(init=False)  # as _page_table
    _host: dict[int, npt.NDArray[np.uint64]] = field(init=False, default_factory=dict)
    _host_windows: dict[int, npt.NDArray[np.uint64]] = field(init=False, default_factory=dict)
    _host_states: dict[int, _State] = field(init=False, default_factory=dict)
    _snapshots: dict[int, _State] = field(init=False, default_factory=dict)
    _rows: dict[int, _Row] = field(init=False, default_factory=dict)
    _queue: deque[FakePending] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        width = -(-self.max_sequence_length // self.page_size)
        self._kv = np.full((self.num_pages, self.page_size), _POISON, dtype=np.uint64)
        self._is_nan = np.zeros((self.num_pages, self.page_size), dtype=np.bool_)
        self._page_table = np.full((self.num_rows, width), -1, dtype=np.int64)
        self._read_at = self._page_table.copy()
        self._window_table = self._page_table.copy()
        pages = self.num_window_pages + 1, self.page_size
        self._window_kv = np.full(pages, _POISON, dtype=np.uint64)
        self._window_is_nan = np.zeros(pages, dtype=np.bool_)
        weights = [_weight(position) for position in range(width * self.page_size)]
        self._weights = np.array(weights, dtype=np.uint64)

    def launch(self, plan: StepPlan) -> FakePending:
        """Queue the step."""
        assert not plan.assumes_right, "it is not known where rows go on"
        pending = FakePending(self, plan)
        self._queue.append(pending)
        return pending

    def close(self) -> None:
        """Drop the steps that have not run."""
        self._queue.clear()

    def run_next(self) -> None:
        """Run the oldest launched step."""
        pending = self._queue.popleft()
        pending.result = self._run(_encoded(pending.plan))

    def _run(self, plan: StepPlan) -> SampledTokens:
        for row in plan.released_rows.tolist():
            if plan.step or row in self._rows:  # a planner that replaces another releases all
                del self._rows[row]
            self._page_table[row] = -1
        self._save(plan.host_saves)
        self._kv[plan.broken_pages] = _POISON
        self._is_nan[plan.broken_pages] = False
        self._window_kv[plan.broken_window_pages] = _POISON
        self._window_is_nan[plan.broken_window_pages] = False
        self.num_cleared += len(plan.broken_pages) + len(plan.broken_window_pages)
        for admission in plan.admissions:
            assert admission.row not in self._rows, "a row is taken twice"
            self._rows[admission.row] = _Row(
                admission, admission.history.tolist(), admission.num_cached_tokens
            )
        self._grant(plan.grants)
        of_windows = plan.window_grants
        places = list(_lines(of_windows.rows, of_windows.indices))
        assert len(places) == len(set(places)), "an entry of the window table is written twice"
        self._window_table[of_windows.rows, of_windows.indices] = of_windows.pages
        self._load(plan.host_loads)
        self._copy(plan.copies)
        self._settle(plan)
        self._keep_states(plan)
        self._read_together(plan)
        chunks, snapshots = plan.chunks, plan.snapshots
        sampled, start = [], 0
        checked = self._checked(plan)
        for row, position, length in _lines(
            plan.checks.rows, plan.checks.starts, plan.checks.lengths
        ):
            tokens = checked[start : start + length]
            start += length
            sampled += self._check_guesses(row, position, tokens)
        start = 0
        for chunk, (row, position, length, next_token) in enumerate(
            _lines(chunks.rows, chunks.starts, chunks.lengths, chunks.next_tokens)
        ):
            if self.has_states:
                self._begin_state(row, position, int(snapshots.begun_from[chunk]))
            saved = np.flatnonzero(snapshots.saved_chunks == chunk)
            positions, numbers = snapshots.saved_positions[saved], snapshots.saved[saved]
            saves = dict(zip(positions.tolist(), numbers.tolist(), strict=True))
            tokens = chunks.tokens[start : start + length].tolist()
            start += length
            self._write(row, position, tokens, saves)
            if next_token == TO_SAMPLE:
                sampled.append(self._sample(row))
        decodes = plan.decodes
        before = {row: self._rows[row].state for row in decodes.rows.tolist()}
        for row, position in _lines(decodes.rows, decodes.positions):
            self._write(row, position, [self._rows[row].last_token])
        sampled += [self._sample(row) for row in plan.decodes.rows.tolist()]
        if len(plan.checks.rows):
            for row, state in before.items():
                self._rows[row].later, self._rows[row].state = [self._rows[row].state], state
        if self.has_states:
            num_unsettled = sum(len(row.later) > 0 for row in self._rows.values())
            assert num_unsettled <= self.most_unsettled, "there is memory for so many updates"
        logprobs = {
            index: TokenLogprobs(logprob=-float(sampled[index]), rank=1)
            for index, row in enumerate(plan.sample_rows.tolist())
            if self._rows[row].admission.sampling.num_logprobs is not None
        }
        return SampledTokens(
            np.array(sampled, dtype=np.int32),
            logprobs,
            self._score(plan),
            mtp_guesses=self._guess_next(plan),
            checked=_told(plan, checked),
        )

    def _checked(self, plan: StepPlan) -> list[int]:
        """The tokens of the plan's checks, with guesses that its rows have of the MTP layer. After
        this step the rows have none but those that it makes."""
        tokens: list[int] = plan.checks.tokens.tolist()
        for index, row in enumerate(plan.checks.token_rows.tolist()):
            if tokens[index] == LAST_TOKEN:
                tokens[index] = self._rows[row].last_token
            elif tokens[index] <= MTP_GUESS:
                assert row not in plan.masked_rows, "masks depend on the guesses before them"
                guesses, number = self._rows[row].mtp_guesses, MTP_GUESS - tokens[index]
                assert number < len(guesses), "guesses are checked that the last step has not made"
                tokens[index] = guesses[number]
        for row in _first_positions(plan):
            self._rows[row].mtp_guesses = []
        return tokens

    def _guess_next(self, plan: StepPlan) -> IntArray:
        """Let the MTP layer guess; returns what is reported, int32[num_reported_rows,
        mtp_tokens]."""
        rows, sampled = plan.mtp_rows.tolist(), dict.fromkeys(plan.sample_rows.tolist())
        assert rows == [row for row in sampled if row in {*rows}], "each once, and in order"
        for row in rows:
            self._rows[row].mtp_guesses = self._mtp_guesses(row)
        reported = [self._rows[row].mtp_guesses for row in plan.reported_rows.tolist()]
        return np.array(reported, dtype=np.int32).reshape(len(reported), self.mtp_tokens)

    def _mtp_guesses(self, row: int) -> list[int]:
        """Guess what comes after the row's last token, each guess as if those before it were right,
        and poison the positions of the passes."""
        state, params = self._rows[row], self._rows[row].admission.sampling
        token, position = state.last_token, state.computed
        context, guesses = self._context(row, position), list[int]()
        for _ in range(self.mtp_tokens):
            context = _add(context, self.model.kv(token, position, context), position)
            position += 1
            index = position - state.admission.num_prompt_tokens
            token = self.model.mtp_guess(context, index, params, (*state.history, *guesses))
            guesses.append(token)
        for touched in range(state.computed, state.computed + self.mtp_tokens - 1):
            page = self._page_table[row, touched // self.page_size]
            assert page >= 0, "a pass of the MTP layer is at a position that has no page"
            self._kv[page, touched % self.page_size] = _POISON
        return guesses

    def _score(self, plan: StepPlan) -> tuple[PromptLogprobs, ...]:
        scores = plan.scores
        tokens = iter(scores.tokens.tolist())
        found = []
        for chunk, start, length in _lines(scores.chunks, scores.starts, scores.lengths):
            row, begin = int(plan.chunks.rows[chunk]), int(plan.chunks.starts[chunk])
            end = begin + int(plan.chunks.lengths[chunk])
            assert begin <= start < start + length <= end, "only computed positions are scored"
            behind = list(islice(tokens, length))
            logprobs = [
                self.model.logprob(token, self._context(row, position + 1))
                for position, token in enumerate(behind, start)
            ]
            ids, nothing = np.array(behind, np.int32), np.empty((length, 0))
            found.append(
                PromptLogprobs(
                    ids,
                    np.array(logprobs, np.float32),
                    np.ones_like(ids),
                    nothing.astype(np.int32),
                    nothing.astype(np.float32),
                )
            )
        return tuple(found)

    def _grant(self, grants: Grants) -> None:
        for row, index, page in _lines(grants.rows, grants.indices, grants.pages):
            self._page_table[row, index] = page
            if index * self.page_size >= self._rows[row].computed:
                self._kv[page] = _POISON  # granted for writing: what it held is gone

    def _save(self, saves: HostCopies) -> None:
        assert len({*saves.slots.tolist()}) == len(saves.slots)
        assert len({*saves.state_slots.tolist()}) == len(saves.state_slots)
        assert len({*saves.window_slots.tolist()}) == len(saves.window_slots)
        for page, slot in _lines(saves.pages, saves.slots):
            assert not self._is_nan[page].any(), "main memory keeps a page with NaN"
            self._host[slot] = self._kv[page].copy()
        for page, slot in _lines(saves.window_pages, saves.window_slots):
            assert not self._window_is_nan[page].any(), "main memory keeps a window with NaN"
            self._host_windows[slot] = self._window_kv[page].copy()
        for snapshot, slot in _lines(saves.snapshots, saves.state_slots):
            self._host_states[slot] = self._snapshots[snapshot]
            assert not self._host_states[slot].has_nan, "main memory keeps states with NaN"

    def _load(self, loads: HostCopies) -> None:
        assert len({*loads.pages.tolist()}) == len(loads.pages)
        assert len({*loads.snapshots.tolist()}) == len(loads.snapshots)
        assert len({*loads.window_pages.tolist()}) == len(loads.window_pages)
        self.num_loaded += len(loads.pages)
        self.num_states_loaded += len(loads.snapshots)
        self.num_windows_loaded += len(loads.window_pages)
        for page, slot in _lines(loads.window_pages, loads.window_slots):
            self._window_kv[page] = self._host_windows[slot]
            assert not self._window_is_nan[page].any(), "a window page with NaN is granted"
        for snapshot, slot in _lines(loads.snapshots, loads.state_slots):
            self._snapshots[snapshot] = self._host_states[slot]
        for page, slot in _lines(loads.pages, loads.slots):
            self._kv[page] = self._host[slot]
            assert not self._is_nan[page].any(), "a page with NaN is granted"

    def _copy(self, copies: Copies) -> None:
        sources, targets = copies.sources.tolist(), copies.targets.tolist()
        assert len({*sources} | {*targets}) == len({*sources}) + len(targets)
        for source, target, length in zip(sources, targets, copies.lengths.tolist(), strict=True):
            self._kv[target] = _POISON
            self._kv[target, :length] = self._kv[source, :length]
            self._is_nan[target, :length] = self._is_nan[source, :length]

    def _read_together(self, plan: StepPlan) -> None:
        """Let each row of a group read the group's pages where the first row has them."""
        decodes, groups = plan.decodes, plan.groups
        positions = dict(zip(decodes.rows.tolist(), decodes.positions.tolist(), strict=True))
        begins = dict.fromkeys(positions, 0)
        borders = np.cumsum([0, *groups.sizes])
        assert borders[-1] == len(groups.members)
        self._read_at[:] = self._page_table
        for group, (first, last) in enumerate(pairwise(borders.tolist())):
            members = groups.members[first:last].tolist()
            begin, end = int(groups.begins[group]), int(groups.ends[group])
            assert len(set(members)) == len(members) > 1
            for row in members:
                assert begins[row] == begin < end, "groups of a row have no gaps"
                assert end * self.page_size <= positions[row], "shared pages are full"
                begins[row] = end
            self._read_at[members, begin:end] = self._page_table[members[0], begin:end]

    def _settle(self, plan: StepPlan) -> None:
        """Let the states of the rows of a step take in the tokens before it."""
        for row, position in _first_positions(plan).items():
            state = self._rows[row]
            if state.later:
                num_right = position - state.state.position
                assert 1 <= num_right <= len(state.later), "states take in tokens that they lack"
                state.state = state.later[num_right - 1]
                state.later = []

    def _keep_states(self, plan: StepPlan) -> None:
        """Keep the states of rows that are about to decode."""
        snapshots, numbers = plan.snapshots, plan.snapshots.kept.tolist()
        assert len(numbers) == len(set(numbers))
        assert not set(numbers) & set(snapshots.begun_from.tolist())
        assert not len(snapshots.kept_rows) or self.has_states
        positions = _first_positions(plan)
        for row, number in _lines(snapshots.kept_rows, snapshots.kept):
            assert positions[row] % WHOLE_EVERY == 0, "states are whole"
            assert positions[row] == self._rows[row].state.position
            self._snapshots[number] = self._rows[row].state
            self.num_kept += 1

    def _begin_state(self, row: int, position: int, snapshot: int) -> None:
        """Set the row's state to the one that its chunk begins with."""
        if snapshot != NO_SNAPSHOT:
            assert position == self._rows[row].admission.num_cached_tokens > 0
            self._rows[row].state = self._snapshots[snapshot]
        elif position == 0:
            self._rows[row].state = _State()

    def _write(
        self, row: int, position: int, tokens: list[int], saves: Mapping[int, int] | None = None
    ) -> None:
        """Compute ``tokens``, and keep the states after the positions of ``saves``."""
        state = self._rows[row]
        assert position == state.computed, "positions are computed in order, each once"
        assert tokens, "a chunk computes at least one token: there are no logits without"
        context = self._context(row, position)
        if not self._has_window(row, position):
            context += 1
        is_nan = self._reads_nan(row, position, position + len(tokens))
        for token in tokens:
            kv = self.model.kv(token, position, context)
            is_nan |= self.model.is_nan(kv) or self.is_hit()
            page = self._page_table[row, position // self.page_size]
            assert page >= 0, "a position is computed that has no page"
            self._kv[page, position % self.page_size] = kv
            self._is_nan[page, position % self.page_size] = is_nan
            if self.window is not None:
                page = self._window_table[row, position // self.page_size]
                assert page >= 0, "a position is computed that has no window page"
                self._window_kv[page, position % self.page_size] = kv
                self._window_is_nan[page, position % self.page_size] = is_nan
            context = _add(context, kv, position)
            carried = _add(state.state.context, kv, position)
            position += 1
            state.state = _State(carried, state.state.has_nan or is_nan, position)
            if saves and position in saves:
                self._snapshots[saves[position]] = state.state
        state.computed = position

    def _check_guesses(self, row: int, position: int, tokens: list[int]) -> list[int]:
        """Compute the row's last token and each guess, and sample after it, as if the guesses had
        been sampled. The row goes on after those that were right, with the state before all."""
        state, guesses = self._rows[row], tokens[1:]
        before, history = state.state, tuple(state.history)
        sampled, later = [], []
        for index, token in enumerate(tokens):
            state.history = [*history, *guesses[:index]]
            self._write(row, position + index, [token])
            sampled.append(self._sample(row))
            later.append(state.state)
        pairs = zip(guesses, sampled, strict=False)
        num_right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        state.computed, state.last_token = position + 1 + num_right, sampled[num_right]
        state.state, state.later = before, later
        state.history = [*history, *sampled[: num_right + 1]]
        return sampled

    def _reads_nan(self, row: int, start: int, end: int) -> bool:
        """Whether the pages of a row have NaN before ``end``, apart from [start, end) itself."""
        pages = self._read_at[row, : -(-end // self.page_size)]
        is_nan = self._is_nan[pages].reshape(-1)
        if self.window is not None:
            is_nan = is_nan | self._window_is_nan[self._window_table[row, : len(pages)]].reshape(-1)
        return bool(is_nan[:start].any() or is_nan[end:].any())

    def _has_window(self, row: int, num_tokens: int) -> bool:
        """Whether the window pages hold what the others hold, as far as the next token sees."""
        if self.window is None:
            return True
        first, num_pages = max(0, num_tokens - self.window + 1), -(-num_tokens // self.page_size)
        of_window = self._window_kv[self._window_table[row, :num_pages]].reshape(-1)
        others = self._kv[self._read_at[row, :num_pages]].reshape(-1)
        return np.array_equal(of_window[first:num_tokens], others[first:num_tokens])

    def _context(self, row: int, num_tokens: int) -> int:
        """All KV before a position, as the page table finds it."""
        num_pages = -(-num_tokens // self.page_size)
        kv = self._kv[self._read_at[row, :num_pages]].reshape(-1)[:num_tokens]
        return int((kv * self._weights[:num_tokens]).sum(dtype=np.uint64))

    def _sample(self, row: int) -> int:
        state = self._rows[row]
        admission = state.admission
        context = self._context(row, state.computed)
        index = state.computed - admission.num_prompt_tokens
        token = self.model.sample(context, index, admission.sampling, tuple(state.history))
        if self.has_states and context != state.state.context:
            token = (token + 1) % self.model.vocabulary  # the state is of other tokens
        if not self._has_window(row, state.computed):
            token = (token + 1) % self.model.vocabulary
        has_nan = self.has_states and state.state.has_nan
        if has_nan or self._reads_nan(row, state.computed, state.computed):
            token = NO_TOKEN
        if admission.sampling.has_penalties:
            state.history.append(token)
        state.last_token = token
        return token


def _told(plan: StepPlan, checked: list[int]) -> IntArray | None:
    """What the device tells of the tokens of checks: the guesses of the MTP layer, if there are
    any."""
    given = plan.checks.tokens
    if not (given <= MTP_GUESS).any():
        return None
    return np.where(given == LAST_TOKEN, given, tokens_of(checked))


def tokens_of(values: list[int]) -> IntArray:
    """A prompt, int32[num_tokens]."""
    return np.array(values, dtype=np.int32)


def _first_positions(plan: StepPlan) -> dict[int, int]:
    """The first position that a step computes of each of its rows."""
    checks, chunks, decodes = plan.checks, plan.chunks, plan.decodes
    rows = np.concatenate([checks.rows, chunks.rows, decodes.rows]).tolist()
    firsts = np.concatenate([checks.starts, chunks.starts, decodes.positions]).tolist()
    return dict(zip(rows, firsts, strict=True))


def _lines(*columns: IntArray) -> Iterator[tuple[int, ...]]:
    """The rows of a table with these columns."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _encoded(plan: StepPlan) -> StepPlan:
    """The plan, its arrays as other ranks get them."""
    decoded = decode_plan(encode_plan(plan))
    return replace(decoded, admissions=plan.admissions, masked_rows=plan.masked_rows)


def _mix(a: int, b: int) -> int:
    """A 64-bit number that depends on all bits of both (the finalizer of splitmix64)."""
    z = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _weight(position: int) -> int:
    return _mix(position, 0) | 1


def _add(context: int, kv: int, position: int) -> int:
    return (context + kv * _weight(position)) & _MASK
