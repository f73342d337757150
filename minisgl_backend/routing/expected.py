"""The prefixes that requests on their way will publish, and at which replicas.

A radix tree over the prompts of these requests, one for all replicas: each node says which replicas
expect it. So one walk enters a prompt, or finds the longest prefix that any of the replicas
expects. A walk has as many steps as the prompt has branches in the tree, however long it is and
however many replicas there are.

Knows keys and the numbers of replicas. Must not know loads, or what is cached.

Invariant: each prompt that was entered ends where a node ends, and that node stays the same until
it is taken out. Nothing depends on keys being different.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from minisgl_backend.routing.keys import Keys, Replicas


@dataclass(slots=True, eq=False)
class ExpectedNode:
    """The pages from ``start`` to ``end`` of all prompts that begin with the same ``end`` pages;
    ``keys`` are those of one of these prompts, and ``counts`` their number at each replica.

    The root has no pages, and counts nothing.
    """

    parent: ExpectedNode | None
    keys: Keys
    start: int
    end: int
    replicas: Replicas = 0
    counts: dict[int, int] = field(default_factory=dict)
    children: dict[int, ExpectedNode] = field(default_factory=dict)  # by the key of the first page

    def end_in(self, keys: Keys) -> int:
        """Where a prompt that begins as this node does leaves it: at its end, or before.

        A key also stands for all pages before it, so keys that differ come last.
        """
        end = min(self.end, len(keys))
        if self.keys[end - 1] == keys[end - 1]:
            return end
        alike = self.keys[self.start : end] == keys[self.start : end]
        return self.start + int(np.count_nonzero(alike))

    def split(self, at: int) -> ExpectedNode:
        """Leave the pages before ``at`` to a new parent, which is returned."""
        assert self.parent is not None
        before = ExpectedNode(
            self.parent, self.keys, self.start, at, self.replicas, dict(self.counts)
        )
        self.parent.children[self.keys.item(self.start)] = before
        before.children[self.keys.item(at)] = self
        self.parent, self.start = before, at
        return before


class ExpectedPrefixes:
    """The prompts, as keys, that replicas are going to publish."""

    def __init__(self) -> None:
        self._root = ExpectedNode(None, np.empty(0, np.uint64), 0, 0)

    def add(self, replica: int, keys: Keys) -> ExpectedNode:
        """A request with this prompt is on its way to a replica; returns where the prompt ends."""
        node, at = self._root, 0
        while at < len(keys):
            key = keys.item(at)
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = ExpectedNode(node, keys, at, len(keys))
            elif (end := child.end_in(keys)) < child.end:
                child = child.split(end)
            child.counts[replica] = child.counts.get(replica, 0) + 1
            child.replicas |= 1 << replica
            node, at = child, child.end
        return node

    def remove(self, replica: int, node: ExpectedNode) -> None:
        """The request whose prompt ends in ``node`` is no longer on its way. Once for each."""
        while (parent := node.parent) is not None:
            node.counts[replica] -= 1
            if not node.counts[replica]:
                del node.counts[replica]
                node.replicas &= ~(1 << replica)
                if not node.counts:
                    del parent.children[node.keys.item(node.start)]
            node = parent

    def longest(self, keys: Keys, among: Replicas) -> tuple[int, Replicas]:
        """Number of pages of the longest prefix that any of the replicas ``among`` expects, and the
        replicas among them that expect it: all, if it is 0."""
        node, at, found = self._root, 0, among
        while at < len(keys):
            child = node.children.get(keys.item(at))
            if child is None or not (holders := child.replicas & among):
                break
            at, found, node = child.end_in(keys), holders, child
            if at < child.end:
                break
        return at, found
