"""What a replica has not told its parent yet, and when it tells it.

Events are told at once, and so is the first token of a request, since its client waits for it.
Other common tokens (``TokenBuffer``) of a busy replica gather for some milliseconds, and so does
what its cache has published: several tokens of a request cost the parent little more than one, and
all replicas share the parent. Pure: knows times only as arguments, and no sockets or threads.

Invariant: what is told about a request, or about the cache, is in the order in which it happened,
and what the cache has published is told before the end of any request that ends later.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from minisgl_backend.replicas.messages import Update, encode_event
from minisgl_backend.request import Event, Generated, RequestId, TerminalEvent, TokenId

Happened: TypeAlias = Update | tuple[RequestId, Event]
"""An event of a request, or an update about anything else."""

_AT_ONCE: Final = 32
"""If fewer requests have tokens, these never wait."""
_EACH_S: Final = 0.0001
"""How long tokens wait, for each request that has some, ..."""
_MOST_S: Final = 0.03
"""... and at most."""


class Gatherer:
    """Gathers what happens, and turns it into updates."""

    def __init__(self) -> None:
        self._updates: list[Update] = []
        self._tokens: dict[RequestId, list[TokenId]] = {}
        self._begun: set[RequestId] = set()
        """Requests of which a token was told."""
        self._first: list[RequestId] = []
        """Requests whose first token is among ``_tokens``."""
        self._published: set[int] = set()
        """The keys in the last update, if that is about published pages."""
        self._is_urgent = False
        self._told_s = float("-inf")
        """When everything was last told."""

    def add(self, happened: Happened) -> None:
        """Something has happened."""
        if not isinstance(happened, tuple):
            self._add_update(happened)
            return
        request_id, event = happened
        if type(event) is Generated and event.logprobs is None and not event.is_last:
            self._tokens.setdefault(request_id, []).append(event.token_id)
            if request_id not in self._begun:
                self._begun.add(request_id)
                self._first.append(request_id)
            return
        if request_id in self._tokens:
            self._updates.append(["t", [request_id], [self._tokens.pop(request_id)]])
        self._updates.append(encode_event(request_id, event))
        self._published.clear()
        self._is_urgent = True
        if isinstance(event, TerminalEvent):
            self._begun.discard(request_id)

    def _add_update(self, update: Update) -> None:
        if update[0] != "+":
            self._updates.append(update)
            self._published.clear()
            self._is_urgent |= update[0] == "l"
            return
        _, keys, pages = update
        # a key that comes again moves to another page: the index must see both
        if self._published and self._published.isdisjoint(keys):
            last = self._updates[-1]
            last[1] += keys
            last[2] += pages
        else:
            self._updates.append(["+", keys, pages])
            self._published.clear()
        self._published.update(keys)

    def due_s(self) -> float | None:
        """When ``take`` gives out what waits; None if nothing does."""
        num = len(self._tokens)
        if not (num or self._updates):
            return None
        return self._told_s + (min(_MOST_S, _EACH_S * num) if num >= _AT_ONCE else 0.0)

    def take(self, now_s: float, *, everything: bool = False) -> list[Update]:
        """What must be told now, in order."""
        due_s = self.due_s()
        if due_s is None:
            return []
        if everything or due_s <= now_s:
            told, self._tokens = self._tokens, {}
            self._told_s = now_s
        elif self._first or self._is_urgent:
            told = {each: self._tokens.pop(each) for each in self._first if each in self._tokens}
        else:
            return []
        self._first.clear()
        updates, self._updates, self._is_urgent = self._updates, [], False
        self._published.clear()
        if told:
            updates.append(["t", list(told), list(told.values())])
        return updates
