"""The router of replicas: the index finds what the replicas' own caches would, and the rule keeps
to its bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Held
from hypothesis.stateful import RuleBasedStateMachine, consumes, invariant, rule

from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.kv import Lease, Verified
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray
from minisgl_backend.routing.cache_index import CacheIndex, TreeReports
from minisgl_backend.routing.expected import ExpectedNode, ExpectedPrefixes
from minisgl_backend.routing.keys import Keys, PrefixKeys
from minisgl_backend.routing.router import Balance, Placement, ReplicaCapacity, Router
from minisgl_kit.routing import reports_to, shares_of_load

PAGE_SIZE = 2
NUM_REPLICAS = 3
NUM_PAGES = 12
KEYS = PrefixKeys(PAGE_SIZE)
SALTS = st.sampled_from(["", "a", "b"])


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def num_cached(index: CacheIndex, replica: int, tokens: IntArray, salt: str = "") -> int:
    """How many pages of a prompt the replica has; the last token is always computed."""
    return index.longest(KEYS.of(tokens[:-1], salt), 1 << replica)[0]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(lambda values: ints(*values))


class ReportedCaches(RuleBasedStateMachine):
    """Real caches that report to an index what they publish and what leaves them."""

    leases: Any = Held("leases")

    def __init__(self) -> None:
        super().__init__()
        self.index = CacheIndex(NUM_REPLICAS, NUM_PAGES)
        self.caches = [self.cache(replica) for replica in range(NUM_REPLICAS)]
        self.asked: list[tuple[IntArray, str]] = [(ints(0, 0, 0, 0, 0), "")]

    def cache(self, replica: int) -> RadixCache:
        watch = reports_to(self.index, replica, PAGE_SIZE)
        return RadixCache(NUM_PAGES, PAGE_SIZE, watch=watch)

    @rule(target=leases, replica=st.integers(0, NUM_REPLICAS - 1), tokens=PROMPTS, salt=SALTS)
    def begin(self, replica: int, tokens: IntArray, salt: str) -> tuple[int, IntArray, str, Lease]:
        self.asked.append((tokens, salt))
        lease = self.caches[replica].acquire(tokens, salt)
        return replica, tokens, salt, lease

    @rule(held=leases)
    def compute(self, held: tuple[int, IntArray, str, Lease]) -> None:
        replica, tokens, _, lease = held
        cache = self.caches[replica]
        if cache.grow(lease, len(tokens)):
            cache.publish(lease, tokens, verified=Verified.ALL)

    @rule(held=consumes(leases))
    def end(self, held: tuple[int, IntArray, str, Lease]) -> None:
        self.caches[held[0]].release(held[3])

    @invariant()
    def finds_what_each_cache_finds(self) -> None:
        for tokens, salt in self.asked[-4:]:
            expected = [cache.match_length(tokens, salt) // PAGE_SIZE for cache in self.caches]
            assert [
                num_cached(self.index, replica, tokens, salt) for replica in range(NUM_REPLICAS)
            ] == expected
            longest, holders = self.index.longest(KEYS.of(tokens[:-1], salt), 0b111)
            assert longest == max(expected)
            assert [holders >> replica & 1 for replica in range(NUM_REPLICAS)] == [
                int(length >= longest) for length in expected
            ]


TestReportedCaches = ReportedCaches.TestCase


def test_a_prefix_in_main_memory_is_as_good_as_cached() -> None:
    index = CacheIndex(2, NUM_PAGES, num_host_slots=2)
    host = HostCache(
        2,
        PAGE_SIZE,
        watch=TreeReports(
            PAGE_SIZE,
            publish=lambda keys, slots: index.publish(1, keys, slots, in_host=True),
            evict=lambda slots: index.evict(1, slots, in_host=True),
            forget=lambda: index.forget(1),
        ),
    )
    long, other = (np.full(3 * PAGE_SIZE, token, np.int32) for token in (1, 2))
    keys = KEYS.of(long, "")
    index.publish(0, keys[:1], ints(0))
    host.save(long, "", ints(7, 8))
    assert index.longest(keys, 0b11) == (2, 0b10)
    assert index.longest(keys[:1], 0b11) == (1, 0b11)
    index.publish(1, keys, ints(0, 1, 2))
    assert index.longest(keys, 0b11) == (3, 0b10)
    index.evict(1, ints(2, 1, 0))  # as if the device had lost them
    assert index.longest(keys, 0b11) == (2, 0b10)
    host.take_saves()
    host.save(other, "", ints(9, 10))
    assert index.longest(keys, 0b11) == (1, 0b01)
    assert index.longest(KEYS.of(other, ""), 0b11) == (2, 0b10)
    host.emptied()
    assert index.longest(KEYS.of(other, ""), 0b11) == (0, 0b11)


class Expectations(RuleBasedStateMachine):
    """Prompts on their way, against a list of them. Keys are drawn from few, so that different
    prompts have the same keys in some places: that must not break anything, and if each key stands
    for all before it, the longest prefix is exact."""

    nodes: Any = Held("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.expected = ExpectedPrefixes()
        self.on_their_way: list[tuple[int, Keys]] = []
        self.are_prefixes = True

    @rule(target=nodes, replica=st.integers(0, NUM_REPLICAS - 1), tokens=PROMPTS, salt=SALTS)
    def add(self, replica: int, tokens: IntArray, salt: str) -> tuple[int, Keys, ExpectedNode]:
        return self.enter(replica, KEYS.of(tokens, salt))

    @rule(
        target=nodes,
        replica=st.integers(0, NUM_REPLICAS - 1),
        keys=st.lists(st.integers(0, 2), max_size=5),
    )
    def add_alike(self, replica: int, keys: list[int]) -> tuple[int, Keys, ExpectedNode]:
        self.are_prefixes = False
        return self.enter(replica, np.array(keys, np.uint64))

    def enter(self, replica: int, keys: Keys) -> tuple[int, Keys, ExpectedNode]:
        self.on_their_way.append((replica, keys))
        return replica, keys, self.expected.add(replica, keys)

    @rule(held=consumes(nodes))
    def remove(self, held: tuple[int, Keys, ExpectedNode]) -> None:
        replica, keys, node = held
        self.expected.remove(replica, node)
        for index, (other, theirs) in enumerate(self.on_their_way):
            if other == replica and theirs is keys:
                del self.on_their_way[index]
                return

    @rule(tokens=PROMPTS, salt=SALTS, among=st.integers(1, 2**NUM_REPLICAS - 1))
    def find(self, tokens: IntArray, salt: str, among: int) -> None:
        keys = KEYS.of(tokens, salt)
        length, holders = self.expected.longest(keys, among)
        shared = [0] * NUM_REPLICAS
        for replica, theirs in self.on_their_way:
            end = min(len(keys), len(theirs))
            agree = int((keys[:end] == theirs[:end]).sum())
            shared[replica] = max(shared[replica], agree)
        within = [shared[replica] for replica in range(NUM_REPLICAS) if among >> replica & 1]
        assert 0 <= length <= len(keys) and holders & among
        if self.are_prefixes:
            assert length == max(within)
            assert holders == sum(
                1 << replica
                for replica in range(NUM_REPLICAS)
                if among >> replica & 1 and shared[replica] == length
            )

    @invariant()
    def is_empty_without_prompts(self) -> None:
        if not self.on_their_way:
            assert not self.expected._root.children


TestExpectations = Expectations.TestCase


def test_a_prefix_that_was_detached_and_published_again_is_still_held() -> None:
    """Its old pages leave the tree later, when the lease that pinned them ends."""
    index = CacheIndex(1, NUM_PAGES)
    cache = RadixCache(NUM_PAGES, PAGE_SIZE, watch=reports_to(index, 0, PAGE_SIZE))
    tokens = ints(1, 2, 3, 4, 5)

    def published(lease: Lease, verified: Verified) -> Lease:
        cache.grow(lease, len(tokens))
        cache.publish(lease, tokens, verified=verified)
        return lease

    first = published(cache.acquire(tokens, ""), Verified.NONE)
    second = cache.acquire(tokens, "")
    cache.discard(first)
    third = published(cache.acquire(tokens, ""), Verified.ALL)
    cache.release(second)
    assert cache.match_length(tokens, "") == 4
    assert num_cached(index, 0, tokens) == 2
    cache.release(third)
    index.forget(0)
    assert not index._cached.holders


def test_a_page_is_not_published_twice() -> None:
    index = CacheIndex(1, NUM_PAGES)
    index.publish(0, KEYS.of(ints(1, 2), ""), ints(3))
    index.publish(0, KEYS.of(ints(1, 2), ""), ints(3))
    with pytest.raises(InvariantError, match="published twice"):
        index.publish(0, KEYS.of(ints(1, 3), ""), ints(3))


def test_keys_tell_tokens_places_and_salts_apart() -> None:
    keys = [
        KEYS.of(tokens, salt)[-1]
        for tokens in (ints(1, 2), ints(2, 1), ints(1, 2, 1, 2), ints(3, 4, 1, 2), ints(1, 2, 3, 4))
        for salt in ("", "a", "b")
    ]
    assert len(set(keys)) == len(keys)
    assert len(KEYS.of(ints(1), "")) == 0
    assert np.array_equal(KEYS.of(ints(1, 2, 3, 4, 5), "")[:1], KEYS.of(ints(1, 2), ""))


def make_router(
    num_replicas: int = NUM_REPLICAS, *, num_rows: int = 100, **balance: float
) -> Router:
    return Router(
        CacheIndex(num_replicas, NUM_PAGES),
        page_size=PAGE_SIZE,
        capacity=ReplicaCapacity(rows=num_rows, prefill_tokens=1000, pages=1000),
        balance=Balance(**balance),
    )


def routed(router: Router, prompt: IntArray) -> Placement:
    placement = router.route(prompt, "")
    assert placement is not None
    return placement


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    router = make_router()
    prompt = ints(*range(9))
    router.index.publish(1, router.keys.of(prompt[:4], ""), ints(0, 1))
    router.index.publish(2, router.keys.of(prompt[:6], ""), ints(5, 6, 7))
    placement = routed(router, prompt)
    assert (placement.replica, placement.num_cached) == (2, 6)


def test_a_prefix_counts_as_cached_from_the_first_request_on() -> None:
    """A burst of requests with one prefix computes it once, not once per replica."""
    router = make_router()
    prompts = [ints(*range(8), 50 + i) for i in range(4)]
    placements = [routed(router, prompt) for prompt in prompts]
    assert len({placement.replica for placement in placements}) == 1
    assert [placement.num_cached for placement in placements] == [0, 8, 8, 8]
    keys = router.keys.of(prompts[0][:-1], "")
    for placement in placements:  # as long as one that will compute it is left
        assert router.index.longest(keys, 0b111)[0] == 4
        router.end(placement)
    assert router.index.longest(keys, 0b111)[0] == 0


def test_without_prefixes_requests_go_round() -> None:
    router = make_router()
    chosen = [routed(router, ints(10 * i, 1, 2)).replica for i in range(6)]
    assert sorted(chosen[:3]) == sorted(chosen[3:]) == [0, 1, 2]


def test_a_burst_fills_the_rows_of_all_replicas_before_any_has_to_wait() -> None:
    """Even though the prompts that wait to be computed are balanced by tokens."""
    router = make_router()
    lengths = np.random.default_rng(0).integers(1, 40, size=300).tolist()
    prompts = [ints(*range(1000 * i, 1000 * i + length)) for i, length in enumerate(lengths)]
    for prompt in prompts[:-3]:
        routed(router, prompt)
    assert (shares_of_load(router)[0] * 100 <= 100).all()
    for prompt in prompts[-3:]:
        routed(router, prompt)
    assert shares_of_load(router)[0].tolist() == [1.0, 1.0, 1.0]


def test_beyond_the_bound_a_prefix_spreads_to_one_more_replica() -> None:
    router = make_router(ratio=1.2, slack=0.02)
    prompt = ints(*range(9))
    chosen = [routed(router, prompt).replica for _ in range(60)]
    first = chosen[0]
    assert chosen[:3] == [first] * 3
    assert set(chosen) == {0, 1, 2}
    counts = np.bincount(chosen)
    assert counts.max() <= 1.2 * counts.mean() + 0.02 * 100 + 1


def test_waiting_for_what_a_prefix_saves_is_no_imbalance() -> None:
    """Its other prompts follow the first one, although only this replica has waiting tokens."""
    router = make_router(ratio=1.0, slack=0.2)
    shared = range(400)
    first = routed(router, ints(*shared, 1000)).replica
    for replica in range(NUM_REPLICAS):  # the same rows everywhere
        if replica != first:
            router.computed(routed(router, ints(2000 + replica)))
    assert routed(router, ints(*shared, 1001)).replica == first


def test_a_short_prefix_pulls_less_than_a_long_one() -> None:
    """If a replica is above the mean, the request that has less to lose goes elsewhere."""
    router = make_router(ratio=2.0, slack=0.0)
    long, short = ints(*range(9)), ints(*range(50, 53))
    router.index.publish(0, router.keys.of(long, ""), ints(0, 1, 2, 3))
    router.index.publish(0, router.keys.of(short, ""), ints(4))
    for replica in (1, 2):
        router.leave(replica)
    for _ in range(300):  # what requests find is 4 pages on average
        router.end(routed(router, long))
    routed(router, ints(90))
    for replica in (1, 2):
        router.join(replica)
        router.index.publish(replica, router.keys.of(ints(70, 71, 72), ""), ints(0))
        routed(router, ints(70 + replica))
    routed(router, long)
    assert shares_of_load(router)[0].tolist() == [0.02, 0.01, 0.01]
    assert routed(router, short).replica != 0
    assert routed(router, long).replica == 0


def test_a_replica_that_left_gets_nothing_and_joins_again() -> None:
    router = make_router()
    prompt = ints(*range(9))
    router.index.publish(1, router.keys.of(prompt[:4], ""), ints(0, 1))
    router.leave(1)
    assert {routed(router, prompt).replica for _ in range(12)} == {0, 2}
    router.leave(0)
    router.leave(2)
    assert router.route(prompt, "") is None
    router.join(1)
    assert routed(router, prompt).replica == 1


def test_a_placement_ends_once() -> None:
    router = make_router()
    placement = routed(router, ints(1, 2, 3))
    router.end(placement)
    router.computed(placement)
    router.grow([placement] * 3)
    assert not shares_of_load(router).any()
    with pytest.raises(InvariantError, match="ends twice"):
        router.end(placement)


@pytest.mark.parametrize("balance", [{"ratio": 0.9}, {"slack": -0.1}, {"ratio": float("nan")}])
def test_a_bound_below_the_mean_is_refused(balance: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="ratio must be at least 1"):
        Balance(**balance)


@settings(deadline=None)
@given(data=st.data(), ratio=st.integers(64, 128), slack=st.integers(0, 64))
def test_the_rule_keeps_its_bound(data: st.DataObject, ratio: int, slack: int) -> None:
    """A request goes to the longest prefix among the replicas in balance, and all of its load is
    taken back. ``ratio`` is in 64ths and ``slack`` in 256ths, which are exact as floats."""
    num_replicas = data.draw(st.integers(1, 9))
    num_rows = data.draw(st.sampled_from([4, 100]))
    router = make_router(num_replicas, num_rows=num_rows, ratio=ratio / 64, slack=slack / 256)
    usual = 0.0
    capacity = np.array([[num_rows], [1000], [1000]])
    is_up, placements = [True] * num_replicas, list[Placement]()
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["route", "route", "route", "computed", "end", "up"]))
        if action == "route" and any(is_up):
            before = np.rint(shares_of_load(router) * capacity).astype(int)
            prompt = data.draw(PROMPTS)
            held = [
                router.index.longest(router.keys.of(prompt[:-1], ""), 1 << replica)[0]
                for replica in range(num_replicas)
            ]
            placement = routed(router, prompt)
            placements.append(placement)
            total = before[:, is_up].sum(axis=1).tolist()
            usual += 0.02 * (max(of for of, up in zip(held, is_up, strict=True) if up) - usual)
            pull = [min(1.0, length / usual) if usual else 0.0 for length in held]
            within = [
                replica
                for replica in range(num_replicas)
                if is_up[replica]
                and all(
                    load
                    <= (1 + pull[replica] * (ratio / 64 - 1)) * of_all / sum(is_up)
                    + pull[replica] * (slack / 256) * most
                    + saved
                    for load, of_all, (most,), saved in zip(
                        before[:, replica].tolist(),
                        total,
                        capacity.tolist(),
                        (0, held[replica] * PAGE_SIZE, 0),
                        strict=True,
                    )
                )
            ]
            allowed = within or [replica for replica in range(num_replicas) if is_up[replica]]
            best = max(held[replica] for replica in allowed)
            alike = [replica for replica in allowed if held[replica] == best]
            assert placement.replica in alike
            load = [
                (before[0, replica] >= num_rows, (before[:, replica] / capacity[:, 0]).max())
                for replica in range(num_replicas)
            ]
            assert load[placement.replica] == min(load[replica] for replica in alike)
            assert placement.num_cached == best * PAGE_SIZE
        elif action == "up":
            replica = data.draw(st.integers(0, num_replicas - 1))
            is_up[replica] = not is_up[replica]
            (router.join if is_up[replica] else router.leave)(replica)
        elif placements and action == "computed":
            router.computed(data.draw(st.sampled_from(placements)))
        elif placements and action == "end":
            router.end(placements.pop(data.draw(st.integers(0, len(placements) - 1))))
        assert (shares_of_load(router) >= 0).all()
    for placement in placements:
        router.end(placement)
    assert not shares_of_load(router).any()
