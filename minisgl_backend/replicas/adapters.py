"""The adapters of several replicas: known here under names and ids, loaded at each replica.

Knows which replicas serve and what they have answered. Must not know requests or tensors.

A name is known once every replica that serves has loaded it. All replicas use the ids given here,
so that prefixes cached with an adapter are the same everywhere. A replica that is started again is
told of all adapters, and gets requests once it has answered. A thread that holds the engine's lock
may take the lock here, never the other way round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from minisgl_backend.errors import InvalidRequest, Recovering
from minisgl_backend.replicas.messages import Message
from minisgl_backend.request import Adapter, AdapterFacts
from minisgl_backend.runtime.adapters import AdapterNames

logger = logging.getLogger(__name__)


class Addressee(Protocol):
    """The part of a replica that is needed here: it takes messages."""

    def send(self, message: Message) -> None: ...


@dataclass(slots=True, eq=False)
class _Loading:
    """An adapter that is being loaded: which replicas have not answered, and what others said."""

    id: int
    name: str
    path: str
    waiting: set[int]
    told: set[AdapterFacts] = field(default_factory=set)
    error: str | None = None

    @property
    def message(self) -> Message:
        return _load(self.id, self.name, self.path)


def _load(adapter_id: int, name: str, path: str) -> Message:
    return {"load": [adapter_id, name, path]}


class ReplicatedAdapters(AdapterNames):
    """See the module's docstring. At first all ``replicas`` serve."""

    def __init__(
        self, replicas: Sequence[Addressee], *, tasks: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(tasks)
        self._replicas = replicas
        self._serves = [True] * len(replicas)
        self._open: dict[int, _Loading] = {}
        self._owed: list[dict[int, str]] = [{} for _ in replicas]  # what restarted ones still load
        self._answered = threading.Condition(self._lock)
        self._is_closed = False

    # --- callers -----------------------------------------------------------------------------

    def load(self, name: str, path: str) -> Adapter:
        """As in ``AdapterNames``, at every replica. Raises ``Recovering`` if none serves until the
        adapter is loaded."""
        with self._lock:
            number = self._begin(name)
            loading = _Loading(number, name, path, set(self._serving()))
            self._open[number] = loading
            try:
                for replica in loading.waiting:
                    self._replicas[replica].send(loading.message)
                self._answered.wait_for(lambda: not loading.waiting or self._is_closed)
            except BaseException:  # Ctrl-C: replicas must not keep a name that is not known here
                self._send_to_all({"unload": name})
                raise
            finally:
                self._loading.discard(name)
                del self._open[number]
            if loading.error is None and len(loading.told) == 1:
                (told,) = loading.told
                adapter = self._known[name] = Adapter(number, name, path, told)
                return adapter
            self._send_to_all({"unload": name})
            if loading.error is not None:
                raise InvalidRequest(loading.error)
            if loading.told:
                raise InvalidRequest(f"adapter {name!r}: its files changed while it was loaded")
            raise Recovering("no replica of the engine serves")

    def unload(self, name: str) -> Adapter:
        with self._lock:
            adapter = self._forget(name)
            self._send_to_all({"unload": name})
            return adapter

    def close(self) -> None:
        """Let callers that still wait for replicas give up."""
        with self._lock:
            self._is_closed = True
            self._answered.notify_all()

    # --- ``ReplicatedEngine``, on the threads of the replicas ---------------------------------

    def joined(self, replica: int) -> bool:
        """A replica serves from now on. Returns whether it has all adapters."""
        with self._lock:
            if not self._serves[replica]:
                self._serves[replica] = True
                for adapter in self._known.values():
                    self._owed[replica][adapter.id] = adapter.name
                    message = _load(adapter.id, adapter.name, adapter.path)
                    self._replicas[replica].send(message)
                for loading in self._open.values():
                    loading.waiting.add(replica)
                    self._replicas[replica].send(loading.message)
            return not self._owed[replica]

    def answered(self, replica: int, adapter_id: int, answer: AdapterFacts | str) -> bool:
        """A replica has loaded an adapter, and these are its facts, or cannot, for this reason.
        Returns whether it had been started again and now has all adapters."""
        with self._lock:
            if not self._serves[replica]:
                return False
            name = self._owed[replica].pop(adapter_id, None)
            if name is not None:
                if isinstance(answer, str):
                    logger.error("replica %d, which was started again: %s", replica, answer)
                elif self._has_changed(adapter_id, answer):
                    logger.error("replica %d: the files of adapter %r have changed", replica, name)
                    self._replicas[replica].send({"unload": name})
                return not self._owed[replica]
            loading = self._open.get(adapter_id)
            if loading is not None:
                loading.waiting.discard(replica)
                if isinstance(answer, str):
                    loading.error = answer
                else:
                    loading.told.add(answer)
                self._answered.notify_all()
            return False

    def lost(self, replica: int) -> None:
        """A replica no longer serves. Idempotent."""
        with self._lock:
            self._serves[replica] = False
            self._owed[replica].clear()
            for loading in self._open.values():
                loading.waiting.discard(replica)
            self._answered.notify_all()

    # --- with the lock held --------------------------------------------------------------------

    def _serving(self) -> list[int]:
        return [replica for replica, serves in enumerate(self._serves) if serves]

    def _has_changed(self, adapter_id: int, told: AdapterFacts) -> bool:
        """Whether this differs from what the replicas reported that loaded the adapter first."""
        found = (each for each in self._known.values() if each.id == adapter_id)
        return any(each.facts != told for each in found)

    def _send_to_all(self, message: Message) -> None:
        for replica in self._serving():
            self._replicas[replica].send(message)
