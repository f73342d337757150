"""Requests and planner setups, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from minisgl_backend.request import Request, RequestId, SamplingParams, samples_of
from tests.fakes.executor import Model, tokens_of
from tests.fakes.harness import Setup


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """A planner whose pages, rows and chunks are scarce."""
    page_size = draw(st.sampled_from([1, 16, 64]))
    num_pages = draw(st.integers(2, 6)) * (6 if page_size == 1 else 1)
    num_snapshots = draw(st.sampled_from([None, None, None, 8, 2]))
    window, num_window_pages, section = None, 0, None
    if num_snapshots is None:
        section = draw(st.sampled_from([None, None, page_size, 2 * page_size]))
    if num_snapshots is None and draw(st.booleans()):
        window = draw(st.sampled_from([2, page_size, page_size + 1, 2 * page_size]))
        least = -(-(window - 1) // page_size) + 2
        num_window_pages = least + draw(st.integers(0, 8))
    longest = page_size * min(num_pages, 30 if page_size == 1 else 4)
    # what comes after a wrong guess must be finite, too, which the oracle does not know
    is_finite, speculative_tokens, mtp_tokens = draw(st.booleans()), 0, 0
    if is_finite:
        speculative_tokens = draw(st.sampled_from([0, 1, 5, 20]))
    if is_finite and window is None and section is None:
        mtp_tokens = draw(st.sampled_from([0, 1, 3]))
    num_host_slots, cache = 0, draw(st.sampled_from(["radix", "radix", "naive"]))
    if cache == "radix":
        num_host_slots = draw(st.sampled_from([0, 2, num_pages, 5 * num_pages]))
    return Setup(
        page_size=page_size,
        num_pages=num_pages,
        max_sequence_length=longest,
        num_rows=draw(st.sampled_from([8, 2, 1])),
        max_prefill_tokens=draw(st.sampled_from([512, 32, 7, 1])),
        policy=draw(st.sampled_from(["fcfs", "lpm"])),
        max_overtaken=draw(st.sampled_from([64, 2, 0])),
        worthwhile_tokens=draw(st.sampled_from([1, 16])),
        group_cost_tokens=draw(st.sampled_from([0, 1, 8])),
        reserve_tokens=draw(st.sampled_from([0, 0, 8])),
        cache=cache,
        num_snapshots=num_snapshots,
        window=window,
        num_window_pages=num_window_pages,
        num_host_slots=num_host_slots,
        num_state_slots=draw(st.sampled_from([3, 20, 0])),
        num_window_slots=draw(st.sampled_from([3, 20, 0])),
        section=section,
        speculative_tokens=speculative_tokens,
        speculative_max_requests=draw(st.sampled_from([8, 2])),
        speculative_recent_tokens=draw(st.sampled_from([60, 0])),
        mtp_tokens=mtp_tokens,
        depth=draw(st.sampled_from([2, 1, 3])),
        model=Model(
            vocabulary=draw(st.sampled_from([50, 5, 2])),
            nan_every=0 if is_finite else draw(st.sampled_from([0, 30])),
            nan_kv_every=0 if is_finite else draw(st.sampled_from([0, 30])),
        ),
    )


@st.composite
def requests(draw: st.DrawFn, setup: Setup, number: int) -> Request:
    """A request that fits, with a prompt that shares whole pages with others, or nearly so."""
    longest = setup.max_sequence_length - 1
    size = setup.page_size
    pattern = draw(st.lists(st.integers(0, 1), max_size=max(2, longest // size // 2)))
    shared = [token for token in pattern for _ in range(size)]
    num_own = draw(st.sampled_from([1, 2, 3, 4, max(1, size - 2), size]))
    own = draw(st.integers(0, 2))
    prompt = ([*shared, *([own] * num_own)])[-longest:]
    num_prompt_logprobs = draw(st.sampled_from([None, None, 0]))
    least_tokens = 1 if num_prompt_logprobs is None else 0
    return Request(
        id=RequestId(number),
        prompt=tokens_of(prompt),
        priority=draw(st.sampled_from([0, 0, 1, -1])),
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
        sampling=SamplingParams(
            max_tokens=draw(st.integers(least_tokens, min(30, longest + 1 - len(prompt)))),
            min_tokens=draw(st.sampled_from([0, 2])),
            seed=draw(st.integers(0, 3)),
            stop_token_ids=draw(st.sampled_from([(), (3,), (3, 2, 1)])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.5])),
            num_logprobs=draw(st.sampled_from([None, 1])),
            num_prompt_logprobs=num_prompt_logprobs,
        ),
    )


@st.composite
def samples(draw: st.DrawFn, setup: Setup, number: int) -> list[Request]:
    """A request, usually with further samples, numbered from ``number`` on."""
    first = draw(requests(setup, number))
    count = draw(st.sampled_from([1, 2, 3, 7])) if first.sampling.max_tokens else 1
    return samples_of(first, [RequestId(number + index) for index in range(count)])


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Setup, list[Request]]:
    """A planner, and the requests that it gets."""
    setup = draw(setups())
    found: list[Request] = []
    for _ in range(draw(st.integers(1, 6))):
        found += draw(samples(setup, len(found)))
    return setup, found
