"""Which leases share pages: groups, from the nodes of the radix tree that leases end at.

Two leases share the pages of the nodes that are on both their paths. A group is a run of pages on
such a path with all leases that continue it. A path may have several groups, one after another: a
system prompt that all share, then examples that some share. A run that is too short, or shared by
too few, becomes part of the groups below it, or is read by each lease alone.

Must not know rows, steps or devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from minisgl_backend.cache.radix import Node
from minisgl_backend.plan import NO_GROUPS, Groups

MOST_LEVELS: Final = 4
"""The most groups that one lease may be in."""


def groups_of(nodes: Sequence[Node], page_size: int, cost_tokens: int) -> Groups:
    """The groups of leases that end at ``nodes``; members are indices of ``nodes``.

    A group must save reading more than ``cost_tokens`` positions for each of its members.
    """
    at = _by_anchor(nodes)
    counts, children = _counted(at)
    sizes: list[int] = []
    begins: list[int] = []
    ends: list[int] = []
    members: list[int] = []
    # node, number of pages before it, first page that is in no group yet, number of groups so far
    stack = [(top, 0, 0, 0) for top in reversed(children.get(None, []))]
    while stack:
        node, depth, begin, level = stack.pop()
        depth += len(node.pages)
        count, below = counts[node], children.get(node, [])
        goes_on = len(below) == 1 and counts[below[0]] == count  # all share the next node, too
        saved = (depth - begin) * page_size * (count - 1)
        if not goes_on and level < MOST_LEVELS and saved > cost_tokens * count:
            sizes.append(count)
            begins.append(begin)
            ends.append(depth)
            members += _members(node, at, children)
            begin, level = depth, level + 1
        stack += [(child, depth, begin, level) for child in reversed(below) if counts[child] > 1]
    if not sizes:
        return NO_GROUPS
    return Groups(*(np.array(column, np.int32) for column in (sizes, begins, ends, members)))


def _by_anchor(nodes: Sequence[Node]) -> dict[Node, list[int]]:
    """The leases, as indices of ``nodes``, by the last node of their path that has other pins.

    Leases whose path has none are left out. The other pins may be those of leases that are not in
    ``nodes``.
    """
    at: defaultdict[Node, list[int]] = defaultdict(list)
    for index, end in enumerate(nodes):
        node = end
        while node.pins == 1 and node.parent is not None:
            node = node.parent
        if node.parent is not None:
            at[node].append(index)
    return dict(at)


def _counted(
    at: dict[Node, list[int]],
) -> tuple[dict[Node, int], dict[Node | None, list[Node]]]:
    """Number of leases that use each node on the paths to the anchors, and the children of each, in
    the order of the leases; the children of None are those of the root."""
    counts: dict[Node, int] = {}
    children: dict[Node | None, list[Node]] = {}
    for anchor, leases in at.items():
        node = anchor
        while node.parent is not None:
            if node not in counts:
                counts[node] = 0
                is_top = node.parent.parent is None
                children.setdefault(None if is_top else node.parent, []).append(node)
            counts[node] += len(leases)
            node = node.parent
    return counts, children


def _members(
    top: Node, at: dict[Node, list[int]], children: dict[Node | None, list[Node]]
) -> list[int]:
    """The leases that use ``top``, depth first, so that the members of a group below it are
    adjacent."""
    found: list[int] = []
    stack = [top]
    while stack:
        node = stack.pop()
        found += at.get(node, [])
        stack += reversed(children.get(node, []))
    return found
