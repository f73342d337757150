"""Planner and fake executor, driven step by step, with a record of what every request got.

The caller decides when requests come and go, when a step is planned and when one is committed; up
to ``depth`` steps are in flight (1 is the synchronous loop, 2 the overlapped one). ``verify`` then
checks the record against ``expected_tokens``.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.host_windows import HostWindows
from minisgl_backend.cache.kv import KVCache
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.plan import NO_TOKEN, StepPlan
from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    samples_of,
)
from minisgl_backend.scheduling.checks import moved_back
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.fakes.executor import (
    FakeExecutor,
    FakePending,
    Model,
    expected_prompt_logprobs,
    expected_tokens,
    tokens_of,
)

_MOST_TURNS = 20
_FIRST_TURN = 1000  # the number of the first request that continues another


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All that may differ between two runs of one workload. With ``num_snapshots``, rows have
    recurrent states; with ``window``, there are ``num_window_pages`` in addition to the other
    pages. Main memory has ``num_host_slots`` and, with snapshots, ``num_state_slots`` or, with
    windows, ``num_window_slots``. Chunks end at ``section`` boundaries."""

    page_size: int
    num_pages: int
    max_sequence_length: int
    num_rows: int = 8
    max_prefill_tokens: int = 32
    policy: str = "fcfs"
    max_overtaken: int = 64
    worthwhile_tokens: int = 1
    group_cost_tokens: int = 0
    reserve_tokens: int = 0
    cache: str = "radix"
    num_snapshots: int | None = None
    window: int | None = None
    num_window_pages: int = 0
    num_host_slots: int = 0
    num_state_slots: int = 0
    num_window_slots: int = 0
    section: int | None = None
    speculative_tokens: int = 0
    speculative_max_requests: int = 8
    speculative_recent_tokens: int = 60
    mtp_tokens: int = 0
    depth: int = 2
    model: Model = field(default_factory=Model)

    def make_cache(self) -> KVCache:
        """An empty cache."""
        windows = None
        if self.window is not None:
            windows = WindowPages(
                self.num_window_pages,
                num_pages=self.num_pages,
                page_size=self.page_size,
                window=self.window,
            )
        if self.cache == "naive":
            return NaiveCache(self.num_pages, self.page_size, windows=windows)
        host = None
        if self.num_host_slots:
            num_state_slots = None if self.num_snapshots is None else self.num_state_slots
            of_windows = None
            if windows is not None:
                of_windows = HostWindows(
                    self.num_window_slots, num_slots=self.num_host_slots, span=windows.span
                )
            host = HostCache(
                self.num_host_slots,
                self.page_size,
                num_state_slots=num_state_slots,
                windows=of_windows,
            )
        if self.num_snapshots is None:
            return RadixCache(self.num_pages, self.page_size, windows=windows, host=host)
        return SnapshotCache(self.num_pages, self.page_size, self.num_snapshots, host=host)


@dataclass(slots=True)
class Record:
    """What one request got."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    ending: Finished | Failed | None = None
    aborted: bool = False


class Harness:
    """One planner with one executor."""

    def __init__(self, setup: Setup, make_cache: Callable[[], KVCache] | None = None) -> None:
        self.setup = setup
        self.cache = (make_cache or setup.make_cache)()
        self.scheduler = Scheduler(
            self.cache,
            SchedulerConfig(
                max_running_requests=setup.num_rows,
                max_prefill_tokens=setup.max_prefill_tokens,
                policy=setup.policy,
                max_overtaken=setup.max_overtaken,
                worthwhile_tokens=setup.worthwhile_tokens,
                names_groups=True,
                group_cost_tokens=setup.group_cost_tokens,
                reserve_tokens=setup.reserve_tokens,
                has_states=setup.num_snapshots is not None,
                section=setup.section,
                speculative_tokens=setup.speculative_tokens,
                speculative_max_requests=setup.speculative_max_requests,
                speculative_recent_tokens=setup.speculative_recent_tokens,
                mtp_tokens=setup.mtp_tokens,
            ),
        )
        self.executor = FakeExecutor(
            setup.num_pages,
            setup.page_size,
            setup.max_sequence_length,
            setup.model,
            num_rows=setup.num_rows,
            has_states=setup.num_snapshots is not None,
            most_unsettled=setup.speculative_max_requests,
            window=setup.window,
            num_window_pages=setup.num_window_pages,
            mtp_tokens=setup.mtp_tokens,
        )
        self.lookahead: Lookahead | None = None
        self.records: dict[RequestId, Record] = {}
        self.num_steps = 0
        self._flights: deque[tuple[StepPlan, FakePending]] = deque()

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched but not committed."""
        return len(self._flights)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)
        self.records[request.id] = Record(request)

    def abort(self, request_id: RequestId) -> None:
        """Abort a request, at any point in its life."""
        record = self.records[request_id]
        was_live = record.ending is None and not record.aborted
        assert self.scheduler.abort(request_id) == was_live
        record.aborted |= was_live

    def launch(self) -> bool:
        """Plan and launch a step; False if nothing can run now."""
        plan = self.scheduler.plan(self.lookahead)
        if plan is None:
            assert self._flights or not self.scheduler.has_work(), "work, but no step: a livelock"
            return False
        assert plan.num_tokens > 0
        assert plan.num_tokens - len(plan.decodes.rows) <= self.setup.max_prefill_tokens
        if (section := self.setup.section) is not None:
            starts, last = plan.chunks.starts, plan.chunks.ends - 1
            assert (starts // section == last // section).all()
        self.num_steps += 1
        if plan.assumes_right:
            before, pending = self._flights[-1]
            plan = moved_back(plan, before, pending.tokens())
        self._flights.append((plan, self.executor.launch(plan)))
        return True

    def commit(self) -> None:
        """Commit the oldest step in flight."""
        plan, pending = self._flights.popleft()
        result = self.scheduler.commit(plan, pending.tokens())
        for request_id, scored in result.scored:
            record = self.records[request_id]
            assert record.ending is None and not record.aborted
            assert not record.tokens, "a prompt is scored before its first token"
            record.prompt_logprobs += scored.logprobs.tolist()
        assert len(result.request_ids) == len(result.token_ids)
        pairs = zip(result.request_ids, result.token_ids.tolist(), strict=True)
        for index, (request_id, token) in enumerate(pairs):
            record = self.records[request_id]
            assert record.ending is None and not record.aborted
            record.tokens.append(token)
            wanted = record.request.sampling.num_logprobs is not None
            assert (index in result.logprobs) == wanted
            assert not wanted or result.logprobs[index].logprob == -token
        for request_id, event in result.ended.items():
            record = self.records[request_id]
            assert record.ending is None and not record.aborted, "a second terminal event"
            record.ending = event

    def step(self) -> None:
        """One turn of a loop that keeps as many steps in flight as it may."""
        launched = self.num_in_flight < self.setup.depth and self.launch()
        if self._flights and (self.num_in_flight >= self.setup.depth or not launched):
            self.commit()

    def drain(self) -> None:
        """Run until all is done."""
        bound = self.num_steps + 100_000
        while self.scheduler.has_work() or self._flights:
            self.step()
            assert self.num_steps < bound, "steps without end"

    def check(self) -> None:
        """The planner's own counts."""
        self.scheduler.check()

    def live(self) -> list[RequestId]:
        """The requests that have not ended."""
        return [i for i, it in self.records.items() if it.ending is None and not it.aborted]

    def verify(self) -> None:
        """Every request got exactly its tokens and one end, and nothing is held any more."""
        for record in self.records.values():
            expected = expected_tokens(record.request, self.setup.model)
            scores = expected_prompt_logprobs(record.request, self.setup.model)
            if record.aborted:
                assert record.prompt_logprobs == scores[: len(record.prompt_logprobs)]
            else:
                assert record.prompt_logprobs == scores
            if record.aborted:
                assert record.ending is None
                assert record.tokens == expected[: len(record.tokens)]
            elif expected[-1:] == [NO_TOKEN]:
                assert record.tokens == expected[:-1]
                assert isinstance(record.ending, Failed)
            else:
                assert record.tokens == expected
                assert record.ending == expected_ending(record.request, expected)
        self.verify_idle()

    def verify_idle(self) -> None:
        """Nothing is held any more."""
        stats = self.scheduler.stats()
        assert (stats.num_waiting, stats.num_running) == (0, 0)
        assert stats.evictable_pages == stats.cached_pages
        assert stats.free_pages + stats.cached_pages == stats.total_pages
        if (windows := self.cache.windows) is not None:
            assert windows.num_available == windows.num_window_pages

    def outputs(self) -> dict[RequestId, list[int]]:
        """The tokens of all requests."""
        return {request_id: record.tokens for request_id, record in self.records.items()}


def expected_ending(request: Request, expected: list[int]) -> Finished:
    """How a request that got those tokens ends."""
    params, last = request.sampling, expected[-1] if expected else NO_TOKEN
    if last in params.stop_token_ids and len(expected) > params.min_tokens:
        return Finished(FinishReason.STOP, last)
    return Finished(FinishReason.LENGTH)


def random_setup(rng: random.Random) -> Setup:
    """Small enough that pages and rows run out and chunks are cut."""
    page_size = rng.choice([1, 1, 2, 4, 16])
    num_pages = rng.choice([8, 14, 30]) * (4 if page_size == 1 else 1)
    num_snapshots = rng.choice([None, None, None, 6])
    window = None if num_snapshots is not None else rng.choice([None, 2, 5, 16, 17])
    num_window_pages = 0
    section = None if num_snapshots is not None else rng.choice([None, page_size, 3 * page_size])
    if window is not None:
        num_window_pages = -(-(window - 1) // page_size) + 2 + rng.choice([0, 3, 12])
    return Setup(
        page_size=page_size,
        num_pages=num_pages,
        max_sequence_length=min(page_size * num_pages, 64),
        num_rows=rng.choice([1, 3, 8]),
        max_prefill_tokens=rng.choice([1, 5, 32, 256]),
        policy=rng.choice(["fcfs", "lpm"]),
        max_overtaken=rng.choice([0, 2, 64]),
        worthwhile_tokens=rng.choice([1, 8]),
        reserve_tokens=rng.choice([0, 0, 4]),
        cache="radix",
        num_snapshots=num_snapshots,
        window=window,
        num_window_pages=num_window_pages,
        section=section,
        depth=rng.choice([1, 2, 3]),
        model=Model(
            vocabulary=rng.choice([6, 50]),
            nan_every=rng.choice([0, 0, 60]),
            nan_kv_every=rng.choice([0, 0, 60]),
        ),
    )


def with_guesses(setup: Setup) -> Setup:
    """The same with guesses while few requests run, at tokens of which there are so few that they
    repeat themselves. What comes after a wrong guess must be finite, too, which the oracle does not
    know."""
    return replace(
        setup, speculative_tokens=5, speculative_max_requests=3, model=Model(vocabulary=2)
    )


def with_mtp(setup: Setup) -> Setup:
    """The same with an MTP layer that guesses three tokens while few requests run."""
    return replace(
        setup,
        section=None,
        mtp_tokens=3,
        speculative_max_requests=3,
        model=Model(vocabulary=6),
    )


def with_host(setup: Setup) -> Setup:
    """The same with prefixes in main memory, which has room for half of the pages."""
    return replace(
        setup,
        num_snapshots=None,
        window=None,
        num_window_pages=0,
        num_host_slots=setup.num_pages // 2,
    )


def with_host_states(setup: Setup) -> Setup:
    """The same for rows with recurrent states, of which the device keeps few."""
    return replace(
        setup,
        cache="radix",
        section=None,
        window=None,
        num_window_pages=0,
        num_snapshots=setup.num_snapshots or 3,
        num_host_slots=setup.num_pages,
        num_state_slots=2,
    )


def with_host_windows(setup: Setup) -> Setup:
    """The same for layers with windows, which have few pages of their own."""
    window = setup.window or setup.page_size + 2
    least = -(-(window - 1) // setup.page_size) + 2
    return replace(
        setup,
        cache="radix",
        section=None,
        mtp_tokens=0,
        num_snapshots=None,
        window=window,
        num_window_pages=max(setup.num_window_pages, least + 2),
        num_host_slots=setup.num_pages,
        num_window_slots=3 * least,
    )


def random_request(rng: random.Random, setup: Setup, number: int) -> Request:
    """A request that fits, whose prompt is likely to share a part with others."""
    longest = setup.max_sequence_length - 1
    stem = [1] * rng.randint(0, longest // 2)
    prompt = (stem + [rng.randint(0, 2) for _ in range(rng.randint(1, 20))])[:longest]
    scores = rng.random() < 0.3
    return Request(
        id=RequestId(number),
        prompt=tokens_of(prompt),
        priority=rng.choice([0, 0, 1]),
        cache_salt=rng.choice(["", "", "a"]),
        sampling=SamplingParams(
            max_tokens=rng.randint(0 if scores else 1, setup.max_sequence_length - len(prompt)),
            min_tokens=rng.choice([0, 3]),
            seed=number,
            stop_token_ids=rng.choice([(), (3,), (3, 4, 5)]),
            presence_penalty=rng.choice([0.0, 1.0]),
            num_logprobs=rng.choice([None, 0]),
            num_prompt_logprobs=0 if scores else None,
        ),
    )


def next_turn(record: Record, number: int, said: list[int], longest: int) -> Request | None:
    """A request that continues from what another one got so far; None if it would not fit."""
    before, sampling = record.request, record.request.sampling
    prompt = [*before.prompt.tolist(), *record.tokens, *said]
    if len(prompt) + max(1, sampling.max_tokens) > longest:
        sampling = replace(sampling, max_tokens=1)
    if len(prompt) >= longest:
        return None
    return replace(
        before, id=RequestId(number), prompt=tokens_of(prompt), sampling=sampling, leader=None
    )


def random_requests(rng: random.Random, setup: Setup) -> list[list[Request]]:
    """Requests, each with its samples."""
    found: list[list[Request]] = []
    for _ in range(rng.randint(1, 12)):
        number = sum(map(len, found))
        first = random_request(rng, setup, number)
        count = rng.choice([1, 1, 2, 5]) if first.sampling.max_tokens else 1
        found.append(samples_of(first, [RequestId(number + index) for index in range(count)]))
    return found


def run_randomly(harness: Harness, rng: random.Random, *, check: bool) -> None:
    """Requests come, go, continue others, and are aborted at any moment; then ``verify``."""
    todo, num_turns = random_requests(rng, harness.setup), 0
    while todo or harness.scheduler.has_work() or harness.num_in_flight:
        if todo and rng.random() < 0.5:
            for request in todo.pop():
                harness.add(request)
        if harness.records and num_turns < _MOST_TURNS and rng.random() < 0.1:
            record, said = rng.choice(list(harness.records.values())), [rng.randint(0, 2)]
            number, longest = _FIRST_TURN + num_turns, harness.setup.max_sequence_length
            if (turn := next_turn(record, number, said, longest)) is not None:
                harness.add(turn)
                num_turns += 1
        if harness.records and rng.random() < 0.05:
            harness.abort(rng.choice(list(harness.records)))
        if harness.num_in_flight and rng.random() < 0.2:
            harness.commit()
        harness.step()
        assert harness.num_steps < 20_000, "steps without end"
        if check:
            harness.check()
    harness.verify()
