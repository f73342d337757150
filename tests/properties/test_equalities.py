"""What must not change the tokens: overlap, chunks, the cache, the policy, the company."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from minisgl_backend.request import Request, RequestId
from tests.fakes.harness import Harness, Setup
from tests.properties.effort import examples
from tests.properties.workloads import workloads


def served(setup: Setup, requests: list[Request]) -> Harness:
    """Serve all requests at once, until all are done."""
    harness = Harness(setup)
    for request in requests:
        harness.add(request)
    harness.drain()
    harness.verify()
    harness.check()
    return harness


def tokens(setup: Setup, requests: list[Request]) -> dict[RequestId, list[int]]:
    return served(setup, requests).outputs()


@settings(max_examples=examples(60))
@given(workloads())
def test_overlap_equals_synchronous(workload: tuple[Setup, list[Request]]) -> None:
    setup, requests = workload
    synchronous = tokens(replace(setup, depth=1), requests)
    assert tokens(replace(setup, depth=2), requests) == synchronous
    assert tokens(replace(setup, depth=4), requests) == synchronous


@settings(max_examples=examples(60))
@given(workloads())
def test_chunked_equals_whole(workload: tuple[Setup, list[Request]]) -> None:
    setup, requests = workload
    whole = tokens(replace(setup, max_prefill_tokens=100_000), requests)
    assert tokens(replace(setup, max_prefill_tokens=3), requests) == whole


@settings(max_examples=examples(60))
@given(workloads())
def test_shared_equals_unshared(workload: tuple[Setup, list[Request]]) -> None:
    setup, requests = workload
    unshared = served(replace(setup, cache="naive"), requests)
    shared = served(replace(setup, cache="radix"), requests)
    assert shared.outputs() == unshared.outputs()
    assert unshared.scheduler.stats().prefix_hits == 0


@settings(max_examples=examples(60))
@given(workloads())
def test_a_full_pool_equals_an_ample_one(workload: tuple[Setup, list[Request]]) -> None:
    setup, requests = workload
    num_pages = 50 * setup.num_pages
    ample = served(replace(setup, num_pages=num_pages, num_window_pages=num_pages), requests)
    assert ample.scheduler.stats().num_retractions == 0
    assert tokens(setup, requests) == ample.outputs()


@settings(max_examples=examples(60))
@given(workloads())
def test_a_request_is_served_alike_alone_and_in_company(
    workload: tuple[Setup, list[Request]],
) -> None:
    setup, requests = workload
    together = tokens(setup, requests)
    for request in requests:
        assert tokens(setup, [request]) == {request.id: together[request.id]}
