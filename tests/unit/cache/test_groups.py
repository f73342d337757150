"""Which leases are grouped: those that share pages, if that saves enough."""

from __future__ import annotations

import numpy as np

from minisgl_backend.cache.kv import Lease, Verified
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.plan import Groups

PAGE_SIZE = 4


class Leases:
    """Leases on prompts, each computed and published in turn."""

    def __init__(self, *prompts: str) -> None:
        """Each character of a prompt fills a page."""
        self.cache = RadixCache(500, PAGE_SIZE)
        self.held = [self.lease(prompt) for prompt in prompts]

    def lease(self, prompt: str) -> Lease:
        tokens = np.repeat([ord(letter) for letter in prompt], PAGE_SIZE).astype(np.int32)
        lease = self.cache.acquire(np.append(tokens, np.int32(0)), "")
        assert self.cache.grow(lease, len(tokens) + 1)
        self.cache.publish(lease, tokens, verified=Verified.ALL)
        return lease

    def groups(self, cost_tokens: int = 0) -> list[tuple[list[int], int, int]]:
        return described(self.cache.groups(self.held, cost_tokens))


def described(groups: Groups) -> list[tuple[list[int], int, int]]:
    members = np.split(groups.members, np.cumsum(groups.sizes))
    return [
        (sorted(of_group.tolist()), begin, end)
        for of_group, begin, end in zip(
            members, groups.begins.tolist(), groups.ends.tolist(), strict=False
        )
    ]


def test_leases_on_one_prefix_are_a_group() -> None:
    leases = Leases("aaaxx", "bbb", "aaay", "aaa", "bb")
    assert leases.groups() == [([0, 2, 3], 0, 3), ([1, 4], 0, 2)]


def test_what_is_not_shared_is_in_no_group() -> None:
    assert Leases("abc", "b", "c", "").groups() == []
    assert described(NaiveCache(8, 4).groups([Lease(), Lease()], 0)) == []


def test_a_prefix_of_all_and_longer_ones_of_some() -> None:
    leases = Leases("ssssaaa1", "ssssbb2", "ssssaaa3", "ssssbb4", "ssss5", "ssssaaa6")
    assert leases.groups() == [
        ([0, 1, 2, 3, 4, 5], 0, 4),
        ([0, 2, 5], 4, 7),
        ([1, 3], 4, 6),
    ]


def test_a_prefix_that_saves_little_goes_to_the_groups_below() -> None:
    leases = Leases("saaaa1", "sbbbb2", "saaaa3", "sbbbb4")
    # all four save 3 * 4 positions, less than 4 * 4; two save 1 * 20 positions, more than 2 * 4
    assert leases.groups(cost_tokens=4) == [([0, 2], 0, 5), ([1, 3], 0, 5)]
    assert leases.groups(cost_tokens=10) == []


def test_a_run_in_several_nodes_is_one_group() -> None:
    leases = Leases("abcdef1", "abcdef2")
    for prompt in ("a9", "abc9", "abcde9"):
        leases.cache.release(leases.lease(prompt))
    assert leases.groups() == [([0, 1], 0, 6)]


def test_leases_of_others_make_no_group() -> None:
    """A page may be shared with leases that are not among those asked about."""
    leases = Leases("aaa1", "aaa2", "aaabb3", "aaabb4")
    others, leases.held = leases.held[:2], leases.held[2:]
    assert leases.groups() == [([0, 1], 0, 5)]
    leases.held = [others[0], leases.held[0]]
    assert leases.groups() == [([0, 1], 0, 3)]
    leases.held = leases.held[:1]
    assert leases.groups() == []


def test_groups_dissolve_with_their_leases() -> None:
    leases = Leases("aa1", "aa2", "aa3")
    leases.cache.release(leases.held.pop(0))
    assert leases.groups() == [([0, 1], 0, 2)]
    leases.cache.discard(leases.held.pop(0))
    assert leases.groups() == []


def test_levels_are_limited() -> None:
    leases = Leases(*("abcdefgh"[: 8 - count] + str(count) for count in range(7)))
    groups = leases.groups()
    assert [begin for _, begin, _ in groups] == [0, 2, 3, 4]
    assert [end for *_, end in groups] == [2, 3, 4, 5]
