"""States that are kept after answers: where the next turn continues from, and at what cost.

Tokens are checked against the oracle, so a state of another position, row or request shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minisgl_backend.plan import WHOLE_EVERY, StepPlan
from minisgl_backend.request import Request, RequestId, SamplingParams
from minisgl_backend.scheduling.lookahead import Lookahead
from tests.fakes.executor import Model, tokens_of
from tests.fakes.harness import Harness, Setup, next_turn

SETUP = Setup(page_size=4, num_pages=64, max_sequence_length=256, num_snapshots=16)


def request(number: int, num_prompt_tokens: int, max_tokens: int) -> Request:
    """A prompt that shares nothing with others."""
    prompt = tokens_of([number + 100, *range(1, num_prompt_tokens)])
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return Request(id=RequestId(number), prompt=prompt, sampling=sampling)


def go_on(harness: Harness, number: int) -> int:
    """Send the next turn of a request, and return how many of its tokens are found."""
    turn = next_turn(harness.records[RequestId(number)], 1000 + number, [7], 256)
    assert turn is not None
    before = harness.scheduler.stats().prefix_hits
    harness.add(turn)
    harness.drain()
    return harness.scheduler.stats().prefix_hits - before


def plans_of(harness: Harness) -> list[StepPlan]:
    """Run to the end; returns the plans."""
    found: list[StepPlan] = []
    plan_step = harness.scheduler.plan

    def watched(lookahead: Lookahead | None = None) -> StepPlan | None:
        plan = plan_step(lookahead)
        if plan is not None:
            found.append(plan)
        return plan

    harness.scheduler.plan = watched  # type: ignore[method-assign]
    harness.drain()
    return found


def kept_positions(harness: Harness) -> list[int]:
    """Run to the end; returns the positions before which states were kept."""
    return [
        position
        for plan in plans_of(harness)
        for row, position in zip(
            plan.decodes.rows.tolist(), plan.decodes.positions.tolist(), strict=True
        )
        if row in plan.snapshots.kept_rows
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_prompt_tokens", [6, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 12, 13, 14, 15, 16])
def test_the_next_turn_goes_on_from_the_answer(
    depth: int, num_prompt_tokens: int, max_tokens: int
) -> None:
    """The last token is sampled but not computed, and the step after a state keeps it."""
    harness = Harness(replace(SETUP, depth=depth))
    harness.add(request(0, num_prompt_tokens, max_tokens))
    harness.drain()
    last_computed = num_prompt_tokens + max_tokens - 2
    of_prompt = (num_prompt_tokens - 1) // 4 * 4
    assert go_on(harness, 0) == max(last_computed // WHOLE_EVERY * WHOLE_EVERY, of_prompt)
    harness.verify()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4])
def test_an_answer_that_is_cut_anywhere_is_found_as_far_as_it_is_known(
    page_size: int, depth: int
) -> None:
    """Tokens of steps in flight are dropped; others must not find a state that has seen them."""
    for num_steps in range(3, 40):
        harness = Harness(replace(SETUP, page_size=page_size, num_pages=256, depth=depth))
        harness.add(request(0, 6, 100))
        for _ in range(num_steps):
            harness.step()
        harness.abort(RequestId(0))
        harness.drain()
        num_known = 6 + len(harness.records[RequestId(0)].tokens)
        found = go_on(harness, 0)
        assert found <= num_known
        if depth < 3:
            assert found >= num_known - WHOLE_EVERY - page_size - 1
        harness.verify()
        harness.check()


def test_a_stop_token_ends_what_is_kept() -> None:
    for number in range(30):
        model = Model(vocabulary=12)
        harness = Harness(replace(SETUP, page_size=1, num_pages=256, model=model))
        first = request(number, 3, 60)
        sampling = replace(first.sampling, stop_token_ids=(5,))
        harness.add(replace(first, sampling=sampling))
        harness.drain()
        num_known = 3 + len(harness.records[RequestId(number)].tokens)
        assert num_known - WHOLE_EVERY - 1 <= go_on(harness, number) <= num_known
        harness.verify()


def test_a_retracted_request_goes_on_from_its_states() -> None:
    setup, hits = replace(SETUP, num_pages=24, max_sequence_length=48, max_overtaken=0), []
    for num_snapshots in (None, SETUP.num_snapshots):
        harness = Harness(replace(setup, num_snapshots=num_snapshots))
        for number, max_tokens in enumerate((30, 40, 20, 36)):
            harness.add(request(number, 5, max_tokens))
        admissions = [admission for plan in plans_of(harness) for admission in plan.admissions]
        assert harness.scheduler.stats().num_retractions == 2
        hits.append(sum(admission.num_cached_tokens for admission in admissions))
        harness.verify()
    with_pages_alone, with_states = hits
    assert with_states >= with_pages_alone - 2 * WHOLE_EVERY > 0


def test_a_failed_request_leaves_no_states() -> None:
    """Its snapshots are free for others, and nothing of the answer is found."""
    harness = Harness(replace(SETUP, model=Model(vocabulary=50, nan_every=40)))
    for number in range(20):
        harness.add(request(number, 6, 60))
    harness.drain()
    harness.verify()
    harness.check()
    assert harness.executor.num_kept > 0
    assert harness.cache.num_taken_snapshots == 0


def test_rows_keep_states_in_half_of_the_snapshots_and_go_on_without() -> None:
    for num_snapshots in (1, 2, 6):
        harness = Harness(replace(SETUP, num_pages=200, num_snapshots=num_snapshots))
        for number in range(8):
            harness.add(request(number, 6, 40))
        while harness.scheduler.has_work():
            harness.step()
            if harness.num_steps > 8:  # the snapshots of prompts are attached by now
                assert harness.cache.num_taken_snapshots <= num_snapshots // 2
        assert (harness.executor.num_kept > 0) == (num_snapshots > 1)
        harness.verify()


def test_states_are_kept_less_often_as_a_sequence_grows() -> None:
    setup = replace(SETUP, page_size=1, num_pages=4096, max_sequence_length=4096)
    harness = Harness(setup)
    harness.add(request(0, 10, 2600))
    positions = kept_positions(harness)
    apart = np.diff(positions)
    assert positions[0] == 2 * WHOLE_EVERY
    least = np.maximum(1, np.minimum(np.array(positions[:-1]) // 16, 64))
    assert (apart == -(-least // WHOLE_EVERY) * WHOLE_EVERY).all()


@pytest.mark.parametrize("changed", [{"num_snapshots": None}, {"cache": "naive"}])
def test_nothing_is_kept_without_states_or_without_a_cache(changed: dict[str, Any]) -> None:
    harness = Harness(replace(SETUP, **changed))
    harness.add(request(0, 6, 40))
    assert kept_positions(harness) == []
    harness.verify()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_states_are_kept_while_guesses_are_checked(page_size: int, depth: int) -> None:
    """At the same positions as without guesses, and no wrong guess is in them."""
    setup = replace(
        SETUP,
        page_size=page_size,
        num_pages=1024,
        depth=depth,
        speculative_tokens=5,
    )
    num_guessed = 0
    for number in range(10):
        harness = Harness(replace(setup, model=Model(vocabulary=1 + number % 2)))
        harness.add(request(number, 6, 60))
        harness.drain()
        num_guessed += harness.scheduler.stats().num_right_guesses
        assert go_on(harness, number) == 64
        harness.verify()
        harness.check()
    assert num_guessed > 200
