"""The planner without an engine, and what tests do with its plans."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.errors import EngineFailure
from minisgl_backend.plan import TO_SAMPLE, SampledTokens, StepPlan
from minisgl_backend.request import (
    Failed,
    Request,
    RequestId,
    SamplingParams,
)
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

PAGE_SIZE = 4
CONFIG = SchedulerConfig(
    max_running_requests=4,
    max_prefill_tokens=16,
    reserve_tokens=0,
)


def make(
    *,
    max_running_requests: int = 4,
    max_prefill_tokens: int = 16,
    num_pages: int = 32,
    reserve_tokens: int = 0,
    speculative_tokens: int = 0,
    speculative_max_requests: int = 8,
    speculative_recent_tokens: int = 0,
    mtp_tokens: int = 0,
    section: int | None = None,
    num_snapshots: int | None = None,
) -> Scheduler:
    """With ``num_snapshots``, rows have recurrent states."""
    config = replace(
        CONFIG,
        max_running_requests=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        reserve_tokens=reserve_tokens,
        speculative_tokens=speculative_tokens,
        speculative_max_requests=speculative_max_requests,
        speculative_recent_tokens=speculative_recent_tokens,
        mtp_tokens=mtp_tokens,
        section=section,
        has_states=num_snapshots is not None,
    )
    if num_snapshots is not None:
        return Scheduler(SnapshotCache(num_pages, PAGE_SIZE, num_snapshots), config)
    return Scheduler(RadixCache(num_pages, PAGE_SIZE), config)


def request(
    number: int,
    num_prompt_tokens: int,
    max_tokens: int = 8,
    *,
    first: int | None = None,
    priority: int = 0,
    sampling: SamplingParams | None = None,
) -> Request:
    """A prompt that shares nothing with others, unless ``first`` says so."""
    prompt = np.arange(num_prompt_tokens, dtype=np.int32)
    prompt[0] = 1000 + number if first is None else first
    return Request(
        id=RequestId(number),
        prompt=prompt,
        priority=priority,
        sampling=replace(sampling or SamplingParams(), max_tokens=max_tokens),
    )


def run_to_first_tokens(
    scheduler: Scheduler, requests: Seq[Request], run: Callable[[], StepResult]
) -> Scheduler:
    """The planner once these requests have their first token; ``run`` runs a step."""
    for each in requests:
        scheduler.add(each)
    num_begun = 0
    while num_begun < len(requests):
        num_begun += len(run().request_ids)
    return scheduler


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.check()
    return plan


def commit(
    scheduler: Scheduler,
    plan: StepPlan,
    token: int | Seq[int] = 5,
    mtp_guesses: Seq[Seq[int]] = (),
    checked: Seq[int] | None = None,
) -> StepResult:
    """``mtp_guesses``: those of each of the plan's ``reported_rows``. ``checked``: the tokens of
    its checks, if the device alone knew some."""
    count = len(plan.sample_rows)
    ids = [token] * count if isinstance(token, int) else list(token)
    guesses = np.array(mtp_guesses, dtype=np.int32)
    tokens = SampledTokens(
        np.array(ids, dtype=np.int32),
        mtp_guesses=guesses,
        checked=None if checked is None else np.array(checked, dtype=np.int32),
    )
    result = scheduler.commit(plan, tokens)
    scheduler.check()
    return result


def step(scheduler: Scheduler, token: int | Seq[int] = 5) -> StepResult:
    return commit(scheduler, planned(scheduler), token)


def chunks(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """The row, start and length of each prefill chunk, and whether it is the last one."""
    columns = (
        plan.chunks.rows.tolist(),
        plan.chunks.starts.tolist(),
        plan.chunks.lengths.tolist(),
        (plan.chunks.next_tokens == TO_SAMPLE).tolist(),
    )
    return list(zip(*columns, strict=True))


def failures(result: StepResult) -> list[int]:
    """The requests that failed because their logits were not finite; no others may have ended."""
    for event in result.ended.values():
        assert isinstance(event, Failed) and isinstance(event.error, EngineFailure)
        assert str(event.error) == "the model's logits were not finite"
    return list(result.ended)


def admitted(plan: StepPlan) -> list[int]:
    return [admission.request_id for admission in plan.admissions]


def broken(scheduler: Scheduler, number: int = 99) -> set[int]:
    """The pages that the next plan clears; it serves one more request, with a finite token."""
    scheduler.add(request(number, 1, max_tokens=1))
    plan = planned(scheduler)
    commit(scheduler, plan)
    pages: list[int] = plan.broken_pages.tolist()
    assert len(pages) == len(set(pages))
    return set(pages)
