"""The radix tree: matching, splitting, the order of eviction, and what its check finds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from minisgl_backend.cache.radix import Node, RadixTree
from minisgl_backend.errors import InvariantError
from minisgl_backend.request import IntArray


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int32)


def add(tree: RadixTree, tokens: IntArray, first_page: int, salt: bytes = b"") -> list[int]:
    """Insert ``tokens`` with pages from ``first_page`` on; returns the pages already there."""
    pages = np.arange(first_page, first_page + len(tokens) // tree.page_size, dtype=np.int32)
    node, known = tree.insert(tree.root, tokens, pages, salt)
    tree.unpin(node)
    tree.check()
    found: list[int] = known.tolist()
    return found


def cached(tree: RadixTree, tokens: IntArray, salt: bytes = b"") -> list[int]:
    """The pages that a match finds; counts as a use."""
    node, pages = tree.match(tokens, salt)
    tree.check()
    tree.unpin(node)
    tree.check()
    found: list[int] = pages.tolist()
    return found


def test_only_whole_pages_match() -> None:
    tree = RadixTree(page_size=2)
    add(tree, ints(1, 2, 3, 4), first_page=10)
    assert cached(tree, ints(1, 2, 3, 4, 5)) == [10, 11]
    assert cached(tree, ints(1, 2, 3)) == [10]
    assert cached(tree, ints(1, 2, 3, 9)) == [10]
    assert cached(tree, ints(1)) == []
    assert cached(tree, ints(1, 9, 3, 4)) == []
    assert tree.match_length(ints(1, 2, 3, 4), b"") == 2


def test_prefixes_that_part_share_what_they_have_in_common() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2, 3, 4), first_page=10)
    assert add(tree, ints(1, 2, 8, 9), first_page=20) == [10, 11]
    assert cached(tree, ints(1, 2, 3, 4)) == [10, 11, 12, 13]
    assert cached(tree, ints(1, 2, 8, 9)) == [10, 11, 22, 23]
    assert tree.num_pages == tree.num_evictable == 6


def test_known_pages_stay_and_the_rest_is_added() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2), first_page=10)
    assert add(tree, ints(1, 2, 3), first_page=20) == [10, 11]
    assert cached(tree, ints(1, 2, 3)) == [10, 11, 22]
    assert add(tree, ints(1, 2, 3), first_page=30) == [10, 11, 22]
    assert tree.num_pages == 3


def test_salts_share_nothing() -> None:
    tree = RadixTree(page_size=2)
    add(tree, ints(1, 2, 3, 4), first_page=10, salt=b"a")
    assert cached(tree, ints(1, 2, 3, 4)) == []
    assert cached(tree, ints(1, 2, 3, 4), b"b") == []
    assert add(tree, ints(1, 2, 3, 4), first_page=20, salt=b"b") == []
    assert cached(tree, ints(1, 2, 3, 4), b"a") == [10, 11]
    assert cached(tree, ints(1, 2, 3, 4), b"b") == [20, 21]


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = RadixTree(page_size=1)
    for first_token in (1, 2, 3):
        add(tree, ints(first_token), first_page=10 * first_token)
    cached(tree, ints(1))
    assert tree.evict(1).tolist() == [20]
    assert tree.evict(2).tolist() == [30, 10]
    assert tree.num_pages == 0


def test_a_prefix_outlives_what_follows_it() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2, 3), first_page=10)
    add(tree, ints(1, 2, 4), first_page=20)
    add(tree, ints(5), first_page=50)
    assert tree.evict(1).tolist() == [12]
    assert tree.evict(1).tolist() == [22]
    assert tree.evict(1).tolist() == [11]
    tree.check()
    assert cached(tree, ints(1, 2, 3)) == [10]


def test_a_leaf_gives_only_the_pages_that_are_needed() -> None:
    tree = RadixTree(page_size=2)
    add(tree, ints(1, 1, 2, 2, 3, 3, 4, 4), first_page=10)
    assert tree.evict(3).tolist() == [11, 12, 13]
    tree.check()
    assert cached(tree, ints(1, 1, 2, 2)) == [10]


def test_a_pinned_prefix_stays() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2, 3), first_page=10)
    node, pages = tree.match(ints(1, 2), b"")
    assert (pages.tolist(), tree.num_evictable) == ([10, 11], 1)
    assert tree.evict(1).tolist() == [12]
    with pytest.raises(InvariantError, match="1 pages wanted, 0 are evictable"):
        tree.evict(1)
    tree.unpin(node)
    assert tree.num_evictable == 2


def trusted(pages: IntArray) -> bool:
    return False


def test_dropping_a_node_drops_its_descendants() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2, 3), first_page=10)
    add(tree, ints(1, 2, 4), first_page=20)
    add(tree, ints(1, 5), first_page=30)
    pinned, _ = tree.match(ints(1), b"")
    node, _ = tree.match(ints(1, 2), b"")
    other, _ = tree.match(ints(1, 2), b"")
    assert tree.drop(other, trusted).tolist() == [], "all of it is pinned"
    tree.check()
    assert sorted(tree.drop(node, trusted).tolist()) == [11, 12, 22]
    tree.check()
    assert cached(tree, ints(1, 2, 3)) == [10]
    assert cached(tree, ints(1, 5)) == [10, 31]
    assert sorted(tree.drop(pinned, trusted).tolist()) == [10, 31]
    assert (tree.num_pages, tree.num_evictable) == (0, 0)


def test_what_is_suspect_is_detached_at_once_and_leaves_with_its_last_pin() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2, 3, 4), first_page=10)
    add(tree, ints(1, 2, 3, 5), first_page=20)
    failing, _ = tree.match(ints(1, 2, 3), b"")
    other, _ = tree.match(ints(1, 2, 3), b"")
    upper, _ = tree.match(ints(1, 2), b"")

    def is_suspect(pages: IntArray) -> bool:
        return bool((pages >= 12).any())

    assert sorted(tree.drop(failing, is_suspect).tolist()) == [13, 23], "what no lease pins"
    tree.check()
    assert cached(tree, ints(1, 2, 3, 4)) == [10, 11]
    assert add(tree, ints(1, 2, 3, 4), first_page=30) == [10, 11], "a new branch beside the old"
    assert tree.insert(other, ints(6), ints(40), b"")[1].tolist() == []
    tree.check()
    (below,) = other.children.values()
    assert cached(tree, ints(1, 2, 3, 6)) == [10, 11, 32]
    assert tree.unpin(below).tolist() == [40, 12]
    tree.check()
    assert (tree.num_pages, tree.num_evictable) == (4, 2)
    assert tree.unpin(upper).tolist() == []
    assert cached(tree, ints(1, 2, 3, 4)) == [10, 11, 32, 33]


def test_a_detached_path_is_dropped_without_touching_what_is_reachable() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2), first_page=10)
    first, _ = tree.match(ints(1, 2), b"")
    second, _ = tree.match(ints(1, 2), b"")
    assert tree.drop(first, lambda pages: True).tolist() == []
    add(tree, ints(1, 2), first_page=20)
    assert tree.drop(second, lambda pages: True).tolist() == [10, 11]
    tree.check()
    assert cached(tree, ints(1, 2)) == [20, 21]


def test_a_split_keeps_the_pins_of_both_parts() -> None:
    tree = RadixTree(page_size=1)
    node, _ = tree.insert(tree.root, ints(1, 2, 3), ints(10, 11, 12), b"")
    other, _ = tree.match(ints(1, 9), b"")
    tree.check()
    assert tree.num_evictable == 0
    tree.unpin(node)
    assert tree.num_evictable == 2
    tree.unpin(other)
    assert tree.num_evictable == 3
    tree.check()


def test_unpinning_twice_is_refused() -> None:
    tree = RadixTree(page_size=1)
    node, _ = tree.insert(tree.root, ints(1), ints(0), b"")
    tree.unpin(node)
    with pytest.raises(InvariantError, match="unpinned twice"):
        tree.unpin(node)


def unlink(tree: RadixTree, node: Node) -> None:
    node.key = b"other"


def empty(tree: RadixTree, node: Node) -> None:
    node.pages = node.pages[:0]


def pin_below(tree: RadixTree, node: Node) -> None:
    node.pins = 1


def lose(tree: RadixTree, node: Node) -> None:
    del tree._recency[node]


def reverse(tree: RadixTree, node: Node) -> None:
    tree._recency.move_to_end(node)


def miscount(tree: RadixTree, node: Node) -> None:
    tree.num_pages += 1


@pytest.mark.parametrize("damage", [unlink, empty, pin_below, lose, reverse, miscount])
def test_check_sees_a_damaged_tree(damage: Callable[[RadixTree, Node], None]) -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1, 2), first_page=10)
    add(tree, ints(1, 2, 3), first_page=20)
    (parent,) = tree.root.children.values()
    (child,) = parent.children.values()
    damage(tree, child)
    with pytest.raises(InvariantError):
        tree.check()


def test_evicting_a_node_with_children_is_refused() -> None:
    tree = RadixTree(page_size=1)
    add(tree, ints(1), first_page=10)
    add(tree, ints(1, 2), first_page=20)
    (parent,) = tree.root.children.values()
    tree._recency.move_to_end(parent, last=False)
    with pytest.raises(InvariantError, match="with children"):
        tree.evict(1)
