"""The responses that the gateway keeps, so that a later request can continue one by its id.

Bounded in number and in bytes: the least recently used go first. Each response belongs to the API
key that asked for it, and is found under no other. Nothing is written to disk. Must not know what a
response says.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as JSON, and the conversation that it ends, in the form of chat templates.

    ``messages`` are shared with the responses before and after it, but counted for each in
    ``num_bytes``, so that the bound holds whichever of them are left. ``items`` are those of its
    output, by their ids.
    """

    id: str
    body: bytes
    messages: Sequence[Mapping[str, Any]]
    items: Mapping[str, Mapping[str, Any]]
    num_bytes: int

    @classmethod
    def of(
        cls,
        id: str,
        body: bytes,
        messages: Sequence[Mapping[str, Any]],
        items: Mapping[str, Mapping[str, Any]],
    ) -> Kept:
        """A response that knows its size."""
        size = len(body) + len(json.dumps(messages)) + len(json.dumps(items))
        return cls(id, body, messages, items, size)


class ResponseMemory:
    """Responses by the label of a key and their id; used on one event loop."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, str], Kept] = OrderedDict()
        self._by_item: dict[tuple[str, str], str] = {}
        """The response that has an item, by the label of a key and the item's id."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, label: str, response: Kept) -> None:
        """Keep a response, in place of the least recently used ones, unless it is too large."""
        if response.num_bytes > self._most_bytes or not self._most:
            return
        self._kept[label, response.id] = response
        self._by_item.update({(label, item): response.id for item in response.items})
        self.num_bytes += response.num_bytes
        while len(self._kept) > self._most or self.num_bytes > self._most_bytes:
            self.remove(*next(iter(self._kept)))

    def find(self, label: str, id: str) -> Kept | None:
        """The response with this id, if it is kept; it now counts as the one used last."""
        response = self._kept.get((label, id))
        if response is not None:
            self._kept.move_to_end((label, id))
        return response

    def find_item(self, label: str, id: str) -> Mapping[str, Any] | None:
        """The item with this id, if a kept response has it. That response now counts as the one
        used last."""
        response_id = self._by_item.get((label, id))
        response = None if response_id is None else self.find(label, response_id)
        return None if response is None else response.items[id]

    def remove(self, label: str, id: str) -> bool:
        """Forget a response; returns whether there was one."""
        response = self._kept.pop((label, id), None)
        if response is None:
            return False
        for item in response.items:
            del self._by_item[label, item]
        self.num_bytes -= response.num_bytes
        return True
