"""`minisgl bench planner`: steady steps, admission, eviction, prefix matching; no model, no device.

Times are wall-clock microseconds of one process. Sampled tokens are made outside the measured
spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from minisgl_backend.cache.kv import Verified
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.plan import SampledTokens, StepPlan, encode_plan
from minisgl_backend.request import IntArray, Request, RequestId, SamplingParams
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.garbage import frozen_objects
from minisgl_kit.report import json_option, write_json

Figures: TypeAlias = dict[str, float]

_TOKEN = 7  # what every row samples; never a stop id
_GOALS = {
    "step_us_p50": 300.0,
    "evict_us_p50": 1000.0,
    "match_us_page_1": 1000.0,
    "match_us_page_16": 1000.0,
    "match_us_page_64": 1000.0,
}


def run(
    *,
    num_steps: int = 2000,
    num_leaves: int = 40_000,
    queue_lengths: tuple[int, ...] = (2500, 5000, 10_000),
) -> Figures:
    """All figures, by name; ``planner`` describes them."""
    figures: Figures = {}
    with frozen_objects():
        for page_size, suffix in ((16, ""), (1, "_page_1"), (64, "_page_64")):
            spans = _step_spans(page_size, num_requests=256, num_steps=num_steps)
            figures[f"step_us_p50{suffix}"] = _percentile(spans, 50)
            figures[f"step_us_p99{suffix}"] = _percentile(spans, 99)
        for name, (without, grouped) in zip(
            ("grouped_step", "regrouped_step"), _grouped_spans(num_steps), strict=True
        ):
            figures[f"{name}_us_p50"] = _percentile(grouped, 50)
            figures[f"{name}_us_p50_without"] = _percentile(without, 50)
        figures["encode_us_p50"] = _percentile(_encode_spans(num_steps), 50)
        for num_requests in queue_lengths:
            figures[f"admit_us_{num_requests}"] = _admit_us(num_requests)
        spans = _evict_spans(num_leaves, num_pages=256)
        figures["evict_us_p50"] = _percentile(spans, 50)
        figures["evict_us_max"] = _percentile(spans, 100)
        for page_size in (1, 16, 64):
            spans = _match_spans(page_size, num_tokens=32_000)
            figures[f"match_us_page_{page_size}"] = _percentile(spans, 50)
    return figures


@click.command()
@json_option
def planner(json_path: Path | None) -> None:
    """Time of the planner's work, without a model.

    step: plan and commit with 256 decoding requests (page size 16 unless said otherwise).
    grouped step: the same in 16 groups that share 2,048 tokens each, and without naming groups.
    regrouped step: one after the end of a request.
    encode: such a plan to the buffer that other ranks get. admit: from a queue of requests to the
    end of each, per request. evict: 256 pages out of 40,000 leaves of one page. match: a
    cached prefix of 32,000 tokens, published in chunks of 2,048.
    """
    figures = run()
    table = Table(title="planner", caption="microseconds")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("at most", justify="right")
    for name, value in figures.items():
        goal = _GOALS.get(name)
        table.add_row(name, f"{value:,.1f}", "" if goal is None else f"{goal:,.0f}")
    Console().print(table)
    if json_path is not None:
        write_json(json_path, figures)


def _step_spans(page_size: int, num_requests: int, num_steps: int) -> list[float]:
    """Plan and commit of steady decode steps; rows cross page borders at different times."""
    scheduler = _decoding_scheduler(page_size, num_requests, num_steps)
    return [_step_span(scheduler) for _ in range(num_steps)]


def _step_span(scheduler: Scheduler) -> float:
    begin = time.perf_counter()
    plan = _planned(scheduler)
    middle = time.perf_counter()
    tokens = _sampled(plan)
    resumed = time.perf_counter()
    scheduler.commit(plan, tokens)
    return middle - begin + time.perf_counter() - resumed


def _grouped_spans(num_steps: int) -> list[tuple[list[float], list[float]]]:
    """Plan and commit of steps of 256 rows that share prefixes, without and with groups, in turns:
    of steady steps, and of those after the end of a request, which regroup the rows."""
    schedulers = [_sharing_scheduler(num_steps, names_groups=named) for named in (False, True)]
    steady: tuple[list[float], list[float]] = ([], [])
    changed: tuple[list[float], list[float]] = ([], [])
    for index in range(num_steps):
        has_ended = index % 40 == 2
        for which, scheduler in enumerate(schedulers):
            if has_ended:
                scheduler.abort(RequestId(index // 40))
            span = _step_span(scheduler)
            if index > 2:  # the first one groups, too
                (changed if has_ended else steady)[which].append(span)
    return [steady, changed]


def decoding_plan(num_requests: int) -> StepPlan:
    """A step in which ``num_requests`` decode."""
    return _planned(_decoding_scheduler(page_size=16, num_requests=num_requests, num_steps=1))


def _encode_spans(num_steps: int) -> list[float]:
    plan = decoding_plan(256)
    return [_span(lambda: encode_plan(plan)) for _ in range(num_steps)]


def _admit_us(num_requests: int) -> float:
    """Time per request from ``add`` to its end, when all are queued at once; one token each."""
    scheduler = _scheduler(num_pages=65_536, page_size=16, max_prefill_tokens=8192)
    requests = [_request(index, num_tokens=64, max_tokens=1) for index in range(num_requests)]
    begin = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        plan = _planned(scheduler)
        scheduler.commit(plan, _sampled(plan))
    return (time.perf_counter() - begin) / num_requests * 1e6


def _evict_spans(num_leaves: int, num_pages: int) -> list[float]:
    """Growing a lease by evicting ``num_pages`` leaves of one page, until most leaves are gone."""
    page_size = 16
    cache = RadixCache(num_leaves, page_size)
    for index in range(num_leaves):
        tokens = _prompt(index, page_size)
        lease = cache.acquire(tokens, "")
        cache.grow(lease, page_size)
        cache.publish(lease, tokens, verified=Verified.ALL)
        cache.release(lease)
    assert (cache.num_free, cache.num_evictable) == (0, num_leaves)
    spans = []
    lease = cache.acquire(_prompt(0, 1), "")
    for count in range(1, num_leaves // num_pages // 2):
        spans.append(_span(partial(cache.grow, lease, count * num_pages * page_size)))
    return spans


def _match_spans(page_size: int, num_tokens: int) -> list[float]:
    cache = RadixCache(num_tokens // page_size, page_size)
    tokens = _prompt(0, num_tokens)
    lease = cache.acquire(tokens, "")
    cache.grow(lease, num_tokens)
    for end in range(2048, num_tokens + 2048, 2048):
        verified = Verified.ALL if end >= num_tokens else Verified.NONE
        cache.publish(lease, tokens[:end], verified=verified)
    cache.release(lease)
    query = np.append(tokens, np.int32(0))  # the last token is always left to compute
    spans = []
    for _ in range(100):
        begin = time.perf_counter()
        lease = cache.acquire(query, "")
        spans.append(time.perf_counter() - begin)
        assert lease.num_shared == num_tokens // page_size
        cache.release(lease)
    return spans


def _decoding_scheduler(page_size: int, num_requests: int, num_steps: int) -> Scheduler:
    longest = 128 + num_steps + 16
    scheduler = _scheduler(
        num_pages=num_requests * (longest // page_size + 1),
        page_size=page_size,
        max_prefill_tokens=num_requests * longest,
        max_running_requests=num_requests,
    )
    for index in range(num_requests):
        scheduler.add(_request(index, num_tokens=64 + index % 64, max_tokens=num_steps + 16))
    plan = _planned(scheduler)
    scheduler.commit(plan, _sampled(plan))
    assert scheduler.stats().num_running == num_requests
    return scheduler


def _sharing_scheduler(num_steps: int, *, names_groups: bool) -> Scheduler:
    """256 requests decode, 16 on each of 16 prefixes of 2,048 tokens."""
    num_own = 128 + num_steps + 16
    config = SchedulerConfig(
        max_prefill_tokens=256 * (2048 + num_own), max_overtaken=256, names_groups=names_groups
    )
    num_pages = (16 * 2048 + 256 * (num_own + 16)) // 16
    scheduler = Scheduler(RadixCache(num_pages, 16), config)
    for index in range(256):
        prefix, own = _prompt(index % 16, 2048), _prompt(index, 128)
        prompt = np.concatenate([prefix, own])
        sampling = SamplingParams(max_tokens=num_steps + 16, stop_token_ids=(1, 2))
        scheduler.add(Request(id=RequestId(index), prompt=prompt, sampling=sampling))
    for _ in range(2):  # the first of each prefix, then the others
        plan = _planned(scheduler)
        scheduler.commit(plan, _sampled(plan))
    assert scheduler.stats().num_running == 256
    return scheduler


def _scheduler(
    num_pages: int, page_size: int, max_prefill_tokens: int, max_running_requests: int = 256
) -> Scheduler:
    config = SchedulerConfig(
        max_running_requests=max_running_requests, max_prefill_tokens=max_prefill_tokens
    )
    return Scheduler(RadixCache(num_pages, page_size), config)


def _request(index: int, num_tokens: int, max_tokens: int) -> Request:
    return Request(
        id=RequestId(index),
        prompt=_prompt(index, num_tokens),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=(1, 2)),
    )


def _prompt(index: int, num_tokens: int) -> IntArray:
    """Tokens that start with ``index``, so that no two prompts share a prefix."""
    tokens = np.arange(num_tokens, dtype=np.int32)
    tokens[0] = index + 1_000_000
    return tokens


def _planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None, "there is work, and nothing in flight"
    return plan


def _sampled(plan: StepPlan) -> SampledTokens:
    return SampledTokens(np.full(len(plan.sample_rows), _TOKEN, dtype=np.int32))


def _span(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _percentile(spans: list[float], percent: float) -> float:
    return float(np.percentile(spans, percent)) * 1e6
