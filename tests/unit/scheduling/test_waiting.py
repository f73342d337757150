"""The order in which waiting sequences are served."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from minisgl_backend.cache.kv import Verified
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray, Request, RequestId
from minisgl_backend.scheduling.adapter_places import AdapterPlaces
from minisgl_backend.scheduling.sequence import Sequence
from minisgl_backend.scheduling.waiting import (
    HEAD_START,
    WaitingQueue,
    precedence_of,
)

MAX_OVERTAKEN = 64


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def arrived(number: int, *, priority: int = 0, prompt: IntArray | None = None) -> Sequence:
    """The ``number``-th request to arrive."""
    tokens = ints(1) if prompt is None else prompt
    request = Request(id=RequestId(number), prompt=tokens, priority=priority)
    return Sequence(request, precedence_of(request, number), tokens)


def order(queue: WaitingQueue) -> list[int]:
    """The numbers of the requests in the order of admission, until the queue is empty."""
    numbers: list[int] = []
    while (sequence := queue.choose()) is not None:
        queue.admit(sequence)
        numbers.append(sequence.request.id)
    return numbers


def cache_with(tokens: IntArray) -> RadixCache:
    cache = RadixCache(64, 1)
    lease = cache.acquire(tokens, "")
    cache.grow(lease, len(tokens))
    cache.publish(lease, tokens, verified=Verified.ALL)
    cache.release(lease)
    return cache


def plain_queue() -> WaitingQueue:
    """A queue that serves by precedence."""
    cache = RadixCache(1, 1)
    return WaitingQueue(cache, "fcfs", 0, worthwhile_tokens=1, places=AdapterPlaces(0))


def prefix_queue(policy: str) -> WaitingQueue:
    """A queue with a cache that has the tokens 1, 2, 3."""
    cache = cache_with(ints(1, 2, 3))
    return WaitingQueue(cache, policy, MAX_OVERTAKEN, worthwhile_tokens=9, places=AdapterPlaces(0))


def test_first_come_first_served_within_a_level() -> None:
    queue = plain_queue()
    for number, priority in enumerate([0, 1, 0, -1, 1, 0]):
        queue.push(arrived(number, priority=priority))
    assert len(queue) == 6
    assert order(queue) == [1, 4, 0, 2, 5, 3]


def test_a_returning_sequence_gets_its_old_place() -> None:
    queue = plain_queue()
    for number in (3, 4, 1):
        queue.push(arrived(number))
    assert order(queue) == [1, 3, 4]


def test_a_low_level_is_overtaken_only_so_often() -> None:
    queue = plain_queue()
    queue.push(arrived(0, priority=0))
    for number in range(1, HEAD_START + 100):
        queue.push(arrived(number, priority=1))
    assert order(queue).index(0) == HEAD_START - 1


def test_the_longest_cached_prefix_goes_first_where_asked_for() -> None:
    prompts = [ints(9, 9, 9, 9), ints(1, 2, 9, 9), ints(1, 2, 3, 9), ints(1, 2, 3, 8)]
    for policy, expected in (("lpm", [2, 3, 1, 0]), ("fcfs", [0, 1, 2, 3])):
        queue = prefix_queue(policy)
        for number, prompt in enumerate(prompts):
            queue.push(arrived(number, prompt=prompt))
        assert order(queue) == expected


def test_a_cached_prefix_does_not_lift_a_request_over_its_level() -> None:
    queue = prefix_queue("lpm")
    queue.push(arrived(0, prompt=ints(1, 2, 3, 4)))
    queue.push(arrived(1, priority=1))
    assert order(queue) == [1, 0]


def test_a_request_without_a_cached_prefix_is_not_overtaken_for_ever() -> None:
    queue = prefix_queue("lpm")
    queue.push(arrived(0, prompt=ints(9)))
    for number in range(1, 2 * MAX_OVERTAKEN):
        queue.push(arrived(number, prompt=ints(1, 2, 3, 4)))
    assert order(queue).index(0) == MAX_OVERTAKEN


def test_only_what_waits_can_be_removed() -> None:
    queue = plain_queue()
    first, second = arrived(0), arrived(1)
    queue.push(first)
    with pytest.raises(InvariantError, match="request 1 is not in the queue"):
        queue.remove(second)
    queue.push(second)
    queue.remove(first)
    assert order(queue) == [1]


def by_prefix(
    max_overtaken: int, *prompts: str, cache: RadixCache | None = None, worthwhile_tokens: int = 2
) -> WaitingQueue:
    """A queue that keeps prefixes together, with a request per prompt and a token per character."""
    queue = WaitingQueue(
        cache or RadixCache(64, 1),
        "fcfs",
        max_overtaken,
        worthwhile_tokens=worthwhile_tokens,
        places=AdapterPlaces(0),
    )
    for number, prompt in enumerate(prompts):
        queue.push(arrived(number, prompt=ints(*map(ord, prompt))))
    return queue


def test_requests_with_a_common_prefix_are_served_together() -> None:
    queue = by_prefix(9, "aaa1", "bbb1", "c", "aaa2", "bbb2", "aaa3", "d")
    assert order(queue) == [0, 3, 5, 1, 4, 2, 6]


def test_a_short_common_prefix_changes_nothing() -> None:
    queue = by_prefix(9, "ab1", "cd1", "ab2", "cd2", worthwhile_tokens=3)
    assert order(queue) == [0, 1, 2, 3]


def test_a_prefix_that_all_share_does_not_change_the_order() -> None:
    queue = by_prefix(9, "sssss1", "sssss2", "sssss3", "sssss4")
    assert order(queue) == [0, 1, 2, 3]


def test_the_salt_keeps_prefixes_apart() -> None:
    queue = by_prefix(9, "aaa1", "b")
    salted = arrived(2, prompt=ints(*map(ord, "aaa2")))
    queue.push(replace(salted, request=replace(salted.request, cache_salt="salt")))
    assert order(queue) == [0, 1, 2]


@pytest.mark.parametrize("max_overtaken", [0, 1, 3, 20])
def test_no_request_is_passed_by_more_than_the_bound(max_overtaken: int) -> None:
    rng = np.random.default_rng(max_overtaken)
    stems = ["a" * 5, "b" * 5, "c" * 5, "ccccdd", ""]
    prompts = [stems[rng.integers(5)] + chr(200 + n) for n in range(200)]
    served = order(by_prefix(max_overtaken, *prompts))
    assert sorted(served) == list(range(200))
    passed = [
        sum(other > number for other in served[:place]) for place, number in enumerate(served)
    ]
    assert max(passed) == max_overtaken


def test_a_companion_of_a_lower_level_is_no_companion() -> None:
    queue = by_prefix(9, "aaa1", "b")
    queue.push(arrived(2, priority=-1, prompt=ints(*map(ord, "aaa2"))))
    assert order(queue) == [0, 1, 2]


def test_a_removed_request_is_no_companion() -> None:
    queue = by_prefix(9, "aaa1", "b")
    gone = arrived(2, prompt=ints(*map(ord, "aaa2")))
    queue.push(gone)
    first = queue.choose()
    assert first is not None
    queue.admit(first)
    assert queue.choose() is gone
    queue.remove(gone)
    assert order(queue) == [1]


def test_a_request_waits_for_a_prefix_that_is_on_its_way() -> None:
    cache = RadixCache(64, 1)
    tokens = ints(*map(ord, "aaa0"))
    lease = cache.acquire(tokens, "")
    assert cache.grow(lease, len(tokens))
    cache.promise(lease, tokens)
    queue = by_prefix(9, "aaa1", "ab2", "b3", cache=cache)
    assert order(queue) == [1, 2]
    assert len(queue) == 1
    cache.publish(lease, tokens, verified=Verified.ALL)
    assert order(queue) == [0]


def test_a_prefix_that_will_not_come_is_not_waited_for() -> None:
    cache = RadixCache(64, 1)
    tokens = ints(*map(ord, "aaa0"))
    lease = cache.acquire(tokens, "")
    cache.promise(lease, tokens)
    queue = by_prefix(9, "aaa1", cache=cache)
    assert queue.choose() is None
    cache.release(lease)
    assert order(queue) == [0]


def test_a_request_that_has_been_passed_often_enough_waits_no_more() -> None:
    cache = RadixCache(64, 1)
    tokens = ints(*map(ord, "aaa0"))
    cache.promise(cache.acquire(tokens, ""), tokens)
    assert order(by_prefix(2, "aaa1", "b", "c", "d", cache=cache)) == [1, 2, 0, 3]
