"""A radix tree over pages: finds the longest cached prefix, and the pages to evict first.

This is the prefix cache of RadixAttention (Zheng et al., arXiv 2312.07104), in whole pages. Each
node except the root stands for a run of pages: their ids, and the tokens that they hold. A child is
looked up by the tokens of its first page, so siblings differ within their first page. Prefixes with
different salts share nothing, since the salt is part of the keys right below the root.

A node can be detached while it is pinned: no match finds it anymore, and it leaves the tree with
its last pin.

The state of a recurrent layer is not in pages. A tree for models with such layers also knows
*snapshots*, numbered copies of the state: a node may have one, of the state after its last token,
and a match ends at a node that has one. A snapshot is lost when its node loses pages or leaves the
tree, or when it is the least recently used and its number is needed.

Must not know leases, free pages, or what a page holds beyond its tokens.

Invariants:
- A pin on a node also pins its ancestors, so all nodes below an unpinned node are unpinned.
- A detached node is pinned, and all nodes below it are detached.
- ``_snapshots`` holds exactly the nodes with a snapshot, none of them detached, the least recently
  used first.
- ``_recency`` holds exactly the unpinned nodes, the least recently used first, and each node after
  all its descendants. So its first node is always the least recently used leaf, and eviction never
  searches the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Set

import numpy as np

from minisgl_backend.errors import InvariantError
from minisgl_backend.plan import NO_SNAPSHOT
from minisgl_backend.request import EMPTY, IntArray


class Node:
    """A run of cached pages, int32[num_pages], that follows the runs of its ancestors.

    ``key`` is its key among the children of its parent; ``pins`` counts the leases that use it.
    """

    __slots__ = (
        "children",
        "is_detached",
        "key",
        "pages",
        "parent",
        "pins",
        "snapshot",
        "tokens",
    )

    def __init__(
        self, parent: Node | None, key: bytes, tokens: IntArray, pages: IntArray, pins: int
    ) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens  # [num_pages * page_size]
        self.pages = pages
        self.pins = pins
        self.snapshot = NO_SNAPSHOT
        self.is_detached: bool = parent is not None and parent.is_detached
        self.children: dict[bytes, Node] = {}


class RadixTree:
    """Cached pages, by all tokens from the start of a sequence."""

    def __init__(self, page_size: int, *, needs_snapshots: bool = False) -> None:
        """``needs_snapshots``: a match ends at a snapshot, or is empty."""
        self.page_size = page_size
        self._needs_snapshots = needs_snapshots
        self._snapshots: OrderedDict[Node, None] = OrderedDict()
        self._lost_snapshots: list[int] = []
        self.root = Node(None, b"", EMPTY, EMPTY, pins=0)
        self.num_pages = 0
        self.num_evictable = 0
        self._recency: OrderedDict[Node, None] = OrderedDict()
        self._detached: dict[Node, None] = {}  # the highest nodes of all detached subtrees

    def match_length(self, tokens: IntArray, salt: bytes) -> int:
        """Number of pages that ``match`` would find. Changes nothing, not even the recency."""
        return sum(num_pages for _, num_pages in self._usable(tokens, salt))

    def cached_length(self, tokens: IntArray, salt: bytes) -> int:
        """Number of leading pages of ``tokens`` that are cached, with or without a snapshot."""
        return sum(num_pages for _, num_pages in self._path(self.root, tokens, salt))

    def pages_along(self, tokens: IntArray, salt: bytes) -> IntArray:
        """The pages of the longest cached prefix of ``tokens``. Changes nothing."""
        path = self._path(self.root, tokens, salt)
        return np.concatenate([EMPTY, *(node.pages[:num_pages] for node, num_pages in path)])

    def match(self, tokens: IntArray, salt: bytes, *, whole: bool = False) -> tuple[Node, IntArray]:
        """Pin the longest cached prefix of ``tokens``, which ends at a snapshot if the tree needs
        them, unless it is to be ``whole``; return its last node and its pages."""
        path: Iterable[tuple[Node, int]] = self._path(self.root, tokens, salt)
        if not whole:
            path = self._usable(tokens, salt)
        node, pages = self._pin_path(self.root, path)
        if node in self._snapshots:
            self._snapshots.move_to_end(node)
        return node, pages

    def insert(
        self, node: Node, tokens: IntArray, pages: IntArray, salt: bytes
    ) -> tuple[Node, IntArray]:
        """Add ``pages``, which hold ``tokens``, below ``node``, and pin them.

        If the tree already holds the beginning of ``tokens`` in other pages, it keeps those and
        pins them instead. Returns the last node, and those other pages: the caller must use them
        in place of its own.
        """
        last, known = self._pin_path(node, self._path(node, tokens, salt))
        if len(known) < len(pages):
            start = len(known)
            rest = tokens[start * self.page_size :].copy()
            child = Node(last, self._key(last, rest, 0, salt), rest, pages[start:].copy(), pins=1)
            last.children[child.key] = child
            self.num_pages += len(child.pages)
            last = child
        return last, known

    def attach(self, node: Node, num_pages: int, snapshot: int) -> bool:
        """Attach ``snapshot``, of the state after the first ``num_pages`` pages of the path to
        ``node``.

        False if there is one already, or if no match can find these pages anymore.
        """
        node, num_of_node = self._at(node, num_pages)
        if node.parent is None or node.is_detached:
            return False
        if num_of_node < len(node.pages):
            node = self._split(node, num_of_node)
        if node.snapshot != NO_SNAPSHOT:
            return False
        node.snapshot = snapshot
        self._snapshots[node] = None
        return True

    def use_snapshot(self, node: Node, num_pages: int) -> bool:
        """Whether there is a snapshot after the first ``num_pages`` pages of the path to ``node``,
        which then becomes the most recently used."""
        node, num_of_node = self._at(node, num_pages)
        if node not in self._snapshots or num_of_node < len(node.pages):
            return False
        self._snapshots.move_to_end(node)
        return True

    def take_lost_snapshots(self) -> list[int]:
        """The snapshots lost since the last call."""
        lost = self._lost_snapshots
        self._lost_snapshots = []
        return lost

    def lose_oldest_snapshot(self, spared: Set[int] = frozenset()) -> None:
        """Lose the least recently used snapshot that is not ``spared``, if there is any."""
        oldest = next((node for node in self._snapshots if node.snapshot not in spared), None)
        if oldest is not None:
            self._lose_snapshot(oldest)

    def snapshots(self) -> list[int]:
        """The snapshots of all nodes, the least recently used first."""
        return [node.snapshot for node in self._snapshots]

    def unpin(self, node: Node) -> IntArray:
        """Take back a pin from ``node`` and its ancestors, which become the most recently used.

        Returns the pages that leave the tree, int32[num_pages]: those of detached nodes that lose
        their last pin.
        """
        removed: list[IntArray] = []
        while node.parent is not None:
            if node.pins <= 0:
                raise InvariantError("a cached prefix is unpinned twice")
            node.pins -= 1
            if node.pins == 0:
                if node.is_detached:
                    removed.append(self._remove(node))
                else:  # a parent comes after its children: see _recency
                    self._recency[node] = None
                    self.num_evictable += len(node.pages)
            node = node.parent
        return np.concatenate(removed) if removed else EMPTY

    def evict(self, num_pages: int) -> IntArray:
        """Drop the least recently used pages, from the ends of leaves, and return them.

        int32[num_pages]. Raises ``InvariantError`` if fewer can be evicted.
        """
        if num_pages > self.num_evictable:
            raise InvariantError(f"{num_pages} pages wanted, {self.num_evictable} are evictable")
        evicted = []
        missing = num_pages
        while missing:
            leaf = next(iter(self._recency))
            self._lose_snapshot(leaf)
            if leaf.children or leaf.parent is None:
                raise InvariantError("a node with children is about to be evicted")
            kept = max(0, len(leaf.pages) - missing)
            evicted.append(leaf.pages[kept:])
            missing -= len(leaf.pages) - kept
            if kept:
                leaf.pages = leaf.pages[:kept]
                leaf.tokens = leaf.tokens[: kept * self.page_size]
            else:
                del self._recency[leaf]
                del leaf.parent.children[leaf.key]
        self.num_pages -= num_pages
        self.num_evictable -= num_pages
        return np.concatenate([EMPTY, *evicted])

    def drop(self, node: Node, is_suspect: Callable[[IntArray], bool]) -> IntArray:
        """Unpin ``node``, and detach the highest node of its path that is suspect or has no other
        pins, with all nodes below.

        Returns the pages that leave the tree now, int32[num_pages]. The pages of nodes with other
        pins leave it with the last pin.
        """
        top, each = None, node
        while each.parent is not None:
            if each.pins == 1 or is_suspect(each.pages):
                top = each
            each = each.parent
        removed = EMPTY if top is None or top.is_detached else self._detach(top)
        return np.concatenate([removed, self.unpin(node)])

    def nodes(self) -> Iterator[Node]:
        """All nodes except the root, parents before their children."""
        yield from self._below(self.root)
        for top in self._detached:
            yield top
            yield from self._below(top)

    def check(self) -> None:
        """Raise ``InvariantError`` if an invariant of the tree is broken. Slow."""
        order = {node: place for place, node in enumerate(self._recency)}
        num_pages = num_evictable = 0
        for node in self.nodes():
            parent = node.parent
            if parent is None or (
                node not in self._detached and parent.children.get(node.key) is not node
            ):
                raise InvariantError("a node is not a child of its parent")
            if node.is_detached != (node in self._detached or parent.is_detached):
                raise InvariantError("not exactly the nodes below detached ones are detached")
            if not len(node.pages) or len(node.tokens) != len(node.pages) * self.page_size:
                raise InvariantError("the tokens of a node do not fill its pages")
            if parent is not self.root and parent.pins < node.pins:
                raise InvariantError("a node is pinned and its parent is not")
            if (node.pins == 0) != (node in order) or (node.is_detached and node in order):
                raise InvariantError("not exactly the unpinned nodes can be evicted")
            if (node.snapshot != NO_SNAPSHOT) != (node in self._snapshots) or (
                node.is_detached and node in self._snapshots
            ):
                raise InvariantError("not exactly the nodes with a snapshot are listed as such")
            if node in order and parent in order and order[parent] < order[node]:
                raise InvariantError("a parent would be evicted before its child")
            num_pages += len(node.pages)
            num_evictable += len(node.pages) if node in order else 0
        if (num_pages, num_evictable) != (self.num_pages, self.num_evictable):
            raise InvariantError(
                f"the tree counts {self.num_pages} pages, {self.num_evictable} of them evictable, "
                f"but holds {num_pages} and {num_evictable}"
            )

    def _at(self, node: Node, num_pages: int) -> tuple[Node, int]:
        """The node on the path to ``node`` in which its first ``num_pages`` pages end, and how many
        of them are of that node."""
        beyond = -num_pages  # pages of the path beyond the end of ``node``, negative if too few
        each: Node | None = node
        while each is not None:
            beyond += len(each.pages)
            each = each.parent
        if beyond < 0:
            raise InvariantError("a snapshot is of tokens that are not cached")
        while beyond >= len(node.pages) and node.parent is not None:
            beyond -= len(node.pages)
            node = node.parent
        return node, len(node.pages) - beyond

    def _below(self, top: Node) -> Iterator[Node]:
        stack = list(top.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _detach(self, top: Node) -> IntArray:
        """Make a pinned node and all below it unreachable; return the pages of the unpinned."""
        assert top.parent is not None
        del top.parent.children[top.key]
        self._detached[top] = None
        removed = [EMPTY]
        for node in [top, *self._below(top)]:
            node.is_detached = True
            self._lose_snapshot(node)
            if node.pins == 0:
                del self._recency[node]
                self.num_evictable -= len(node.pages)
                removed.append(self._remove(node))
        return np.concatenate(removed)

    def _remove(self, node: Node) -> IntArray:
        """Take a detached node without pins out of the tree; return its pages."""
        assert node.parent is not None
        if node in self._detached:  # its parent may have a new child under the same key
            del self._detached[node]
        else:
            del node.parent.children[node.key]
        self.num_pages -= len(node.pages)
        return node.pages

    def _lose_snapshot(self, node: Node) -> None:
        if node.snapshot != NO_SNAPSHOT:
            del self._snapshots[node]
            self._lost_snapshots.append(node.snapshot)
            node.snapshot = NO_SNAPSHOT

    def _usable(self, tokens: IntArray, salt: bytes) -> list[tuple[Node, int]]:
        """The nodes that ``match`` finds, each with its number of matching pages."""
        path = list(self._path(self.root, tokens, salt))
        if self._needs_snapshots:
            while path and (
                path[-1][0].snapshot == NO_SNAPSHOT or path[-1][1] < len(path[-1][0].pages)
            ):
                path.pop()
        return path

    def _key(self, parent: Node, tokens: IntArray, page: int, salt: bytes) -> bytes:
        start = page * self.page_size
        first_page = tokens[start : start + self.page_size].tobytes()
        return salt + first_page if parent is self.root else first_page

    def _path(self, node: Node, tokens: IntArray, salt: bytes) -> Iterator[tuple[Node, int]]:
        """The nodes below ``node`` along ``tokens``, each with its number of matching pages."""
        num_pages = len(tokens) // self.page_size
        done = 0
        while done < num_pages:
            child = node.children.get(self._key(node, tokens, done, salt))
            if child is None:
                return
            rest = tokens[done * self.page_size : num_pages * self.page_size]
            agreed = self._agreed_pages(child.tokens, rest)
            ends_here = agreed < len(child.pages)  # known before the caller may split the child
            yield child, agreed
            if ends_here:
                return
            node = child
            done += agreed

    def _agreed_pages(self, a: IntArray, b: IntArray) -> int:
        num_tokens = min(len(a), len(b))
        differ = a[:num_tokens] != b[:num_tokens]
        first = int(differ.argmax())  # 0 also if none differs
        return (first if differ[first] else num_tokens) // self.page_size

    def _pin_path(self, node: Node, path: Iterable[tuple[Node, int]]) -> tuple[Node, IntArray]:
        """Pin the nodes of a path below ``node``; return the last one and all their pages.

        If only the first pages of the last node match, the node is split after them.
        """
        pages = [EMPTY]
        for child, agreed in path:
            node = child if agreed == len(child.pages) else self._split(child, agreed)
            if node.pins == 0:
                del self._recency[node]
                self.num_evictable -= len(node.pages)
            node.pins += 1
            pages.append(node.pages)
        return node, np.concatenate(pages)

    def _split(self, lower: Node, num_pages: int) -> Node:
        """Move the first pages of ``lower`` to a new node above it, which is returned."""
        parent = lower.parent
        assert parent is not None
        num_tokens = num_pages * self.page_size
        upper = Node(
            parent, lower.key, lower.tokens[:num_tokens], lower.pages[:num_pages], lower.pins
        )
        parent.children[upper.key] = upper
        lower.parent = upper
        lower.tokens = lower.tokens[num_tokens:]
        lower.pages = lower.pages[num_pages:]
        lower.key = lower.tokens[: self.page_size].tobytes()
        upper.children[lower.key] = lower
        if upper.pins == 0:
            self._recency[upper] = None
        return upper


def salt_key(salt: str) -> bytes:
    """The salt as a part of the tree's keys."""
    return salt.encode("utf-8", "surrogatepass")


def salt_of(key: bytes) -> str:
    """The inverse of ``salt_key``."""
    return key.decode("utf-8", "surrogatepass")
