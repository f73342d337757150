"""The LoRA adapters that requests may name: which are known, and which main memory holds.

An adapter is *known* under a name from when it is loaded until it is unloaded. Main memory holds
some of the known ones (the *pool*). A request whose adapter is not in the pool waits until a thread
has read it. From then until it ends, the request *holds* the adapter and so keeps it in the pool.
Adapters that no request holds leave the pool when others need the place, the least recently used
first. If all are held, an adapter waits for a place. Requests whose adapters are in the pool pass
it. But after ``MOST_PAST`` of them, later ones with the adapter that the fewest hold wait behind
it, so that the place becomes free; after as many again, so do those with another one, and so on.

Unloading removes the name at once, and the adapter when its last request has ended. An adapter that
is loaded under the same name later is a different one, with a different id.

Knows names, paths and counts; a ``Reader`` knows files and tensors. Must not know slots.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from minisgl_backend.errors import (
    ConfigError,
    EngineFailure,
    InvalidRequest,
    MiniSGLError,
)
from minisgl_backend.request import Adapter, AdapterFacts, RequestId

logger = logging.getLogger(__name__)

MOST_PAST: Final = 64
_NAME_CHARACTERS: Final = 128


class Reader(Protocol):
    """Reads adapters into main memory. For any thread."""

    def check(self, folder: Path) -> AdapterFacts:
        """Read an adapter without keeping it. Raises ``ConfigError``."""

    def read(self, adapter_id: int, folder: Path) -> AdapterFacts:
        """Read an adapter into memory. Raises ``ConfigError``."""

    def drop(self, adapter_id: int) -> None:
        """Forget an adapter; ignored if there is none."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outcome of a request's wait for its adapter: the error, if any."""

    request_id: RequestId
    error: MiniSGLError | None


@dataclass(slots=True)
class _Entry:
    """An adapter in the pool, or one that waits for a place there: the requests that hold it, and
    those that wait."""

    adapter: Adapter
    holders: set[RequestId] = field(default_factory=set)
    waiting: dict[RequestId, Callable[[Fetched], None]] = field(default_factory=dict)
    is_there: bool = False


class AdapterNames(ABC):
    """The names of adapters that requests may use; for any thread."""

    def __init__(self, tasks: Mapping[int, str] | None = None) -> None:
        """``tasks`` are the names by ``lora_task_id``."""
        self._tasks = tasks or {}
        self._lock = threading.Lock()
        self._known: dict[str, Adapter] = {}
        self._loading: set[str] = set()
        self._num_ids = 0

    def known(self) -> Mapping[str, Adapter]:
        """All known adapters by name, in the order in which they were loaded."""
        with self._lock:
            return dict(self._known)

    def find(self, name: str) -> Adapter:
        """The adapter of this name; raises ``InvalidRequest`` if there is none."""
        with self._lock:
            adapter = self._known.get(name)
            if adapter is None:
                names = list(self._known)
                raise InvalidRequest(
                    f"LoRA {_shown(name)} is not supported, we currently support {names}"
                )
            return adapter

    def of_task(self, task_id: int) -> Adapter:
        """The adapter of this ``lora_task_id``; raises ``InvalidRequest`` if there is none."""
        if task_id not in self._tasks:
            raise InvalidRequest(f"lora_task_id {task_id} is none of lora_task_ids")
        return self.find(self._tasks[task_id])

    @abstractmethod
    def load(self, name: str, path: str) -> Adapter:
        """Make an adapter known. It is read, and stays in memory if the pool has room.

        Raises ``InvalidRequest`` with the name of the tensor or field that does not fit; the
        adapter is then not known.
        """

    @abstractmethod
    def unload(self, name: str) -> Adapter:
        """Forget a name; requests that have the adapter go on. Raises ``InvalidRequest``."""

    # --- with the lock held --------------------------------------------------------------------

    def _begin(self, name: str) -> int:
        """Reserve a name that is about to be loaded; the id of its adapter."""
        _check_type(name)
        if not (0 < len(name) <= _NAME_CHARACTERS and name.isprintable()):
            raise InvalidRequest(
                f"the name of an adapter must have 1..{_NAME_CHARACTERS} printable characters"
            )
        if name in self._known or name in self._loading:
            raise InvalidRequest(f"the adapter {name!r} is loaded already; unload it first")
        self._loading.add(name)
        self._num_ids += 1
        return self._num_ids

    def _forget(self, name: str) -> Adapter:
        _check_type(name)
        adapter = self._known.pop(name, None)
        if adapter is None:
            raise InvalidRequest(f"there is no adapter {_shown(name)!r}")
        return adapter


class Adapters(AdapterNames):
    """All adapters of an engine."""

    def __init__(
        self, reader: Reader, *, most_in_memory: int, tasks: Mapping[int, str] | None = None
    ) -> None:
        super().__init__(tasks)
        self._reader = reader
        self._most = most_in_memory
        # by adapter; of those that no request holds, the one used least recently comes first
        self._pool: dict[int, _Entry] = {}
        # by adapter, oldest first: what waits for a place in the pool, or behind such an adapter
        self._wanted: dict[int, _Entry] = {}
        self._num_past = 0  # requests that have passed the oldest of these
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._is_closed = False

    # --- names -------------------------------------------------------------------------------

    def load(self, name: str, path: str, *, adapter_id: int | None = None) -> Adapter:
        """As in ``AdapterNames``. The caller chooses either all ids (``adapter_id``) or none."""
        with self._lock:
            own_id = self._begin(name)
            adapter_id = own_id if adapter_id is None else adapter_id
            is_read = self._make_room(num_more=len(self._loading))
        adapter = None
        try:
            folder = Path(path)
            facts = self._reader.read(adapter_id, folder) if is_read else self._reader.check(folder)
            adapter = Adapter(adapter_id, name, path, facts)
        except ConfigError as error:
            raise InvalidRequest(f"adapter {name!r}: {error}") from None
        finally:
            with self._lock:
                self._loading.discard(name)
                if adapter is not None:
                    self._known[name] = adapter
                if adapter is not None and is_read and self._make_room():
                    self._pool[adapter_id] = _Entry(adapter, is_there=True)
                elif is_read:
                    self._reader.drop(adapter_id)
        base = f", trained for {facts.base!r}" if facts.base else ""
        logger.info("loaded adapter %r of rank %d from %s%s", name, facts.rank, path, base)
        return adapter

    def unload(self, name: str) -> Adapter:
        with self._lock:
            adapter = self._forget(name)
            self._drop_unknown(adapter.id)
            self._serve_wanted()
        logger.info("unloaded adapter %r", name)
        return adapter

    def asked_for(self) -> Mapping[int, str]:
        """The names of the adapters of open requests, by id."""
        with self._lock:
            entries = [*self._pool.values(), *self._wanted.values()]
            return {
                entry.adapter.id: entry.adapter.name
                for entry in entries
                if entry.holders or entry.waiting
            }

    # --- requests, on the loop's thread -------------------------------------------------------

    def hold(
        self, request_id: RequestId, adapter: Adapter, report: Callable[[Fetched], None]
    ) -> bool:
        """Let a request hold its adapter. True if it does so at once; else ``report`` is called, on
        any thread, once it does, or if the adapter cannot be read."""
        with self._lock:
            entry = self._pool.get(adapter.id)
            if entry is not None and entry.is_there and not self._is_kept(entry):
                self._num_past = self._num_past + 1 if self._wanted else 0
                entry.holders.add(request_id)
                return True
            if entry is None or entry.is_there:
                entry = self._wanted.setdefault(adapter.id, _Entry(adapter))
            entry.waiting[request_id] = report
            self._serve_wanted()
            return False

    def let_go(self, request_id: RequestId, adapter: Adapter) -> None:
        """The request has ended, whether it held its adapter or still waited for it."""
        with self._lock:
            if (entry := self._wanted.get(adapter.id)) is not None:
                entry.waiting.pop(request_id, None)
                if not entry.waiting:
                    del self._wanted[adapter.id]
            if (entry := self._pool.pop(adapter.id, None)) is not None:
                entry.holders.discard(request_id)
                entry.waiting.pop(request_id, None)
                self._pool[adapter.id] = entry
            self._drop_unknown(adapter.id)
            self._serve_wanted()

    def close(self) -> None:
        """End the thread; nothing more is reported."""
        with self._lock:
            self._is_closed = True
            self._wanted.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # --- with the lock held --------------------------------------------------------------------

    def _make_room(self, num_more: int = 1) -> bool:
        """Whether ``num_more`` adapters may be in the pool, after idle ones have left."""
        surplus = len(self._pool) + num_more - self._most
        if surplus <= 0:
            return True
        idle = [entry for entry in self._pool.values() if entry.is_there and not entry.holders]
        if len(idle) < surplus:  # the idle ones would leave in vain
            return False
        for entry in idle[:surplus]:
            del self._pool[entry.adapter.id]
            self._reader.drop(entry.adapter.id)
        return True

    def _serve_wanted(self) -> None:
        """Give places to the adapters that wait, as many as there is room for, and begin to read
        them. Requests that waited behind such an adapter go on."""
        while self._wanted and not self._is_closed:
            first = next(iter(self._wanted))
            if first not in self._pool:
                if not self._make_room():
                    return
                entry = self._pool[first] = self._wanted.pop(first)
                self._thread.submit(self._read, entry)
            self._num_past = 0
            for adapter_id in [each for each in self._wanted if each in self._pool]:
                waiting = self._wanted.pop(adapter_id).waiting
                self._pool[adapter_id].holders.update(waiting)
                for request_id, report in waiting.items():
                    report(Fetched(request_id, None))

    def _is_kept(self, entry: _Entry) -> bool:
        """Whether requests with an adapter in the pool wait, so that its place becomes free."""
        if not self._wanted or self._num_past < MOST_PAST:
            return False
        own = len(entry.holders), entry.adapter.id
        others = ((len(other.holders), it) for it, other in self._pool.items() if other.is_there)
        return sum(other < own for other in others) < self._num_past // MOST_PAST

    def _drop_unknown(self, adapter_id: int) -> None:
        """Let an adapter leave the pool if it is not known, and nothing holds or awaits it."""
        entry = self._pool.get(adapter_id)
        if entry is None or not entry.is_there or entry.holders or adapter_id in self._wanted:
            return
        known = self._known.get(entry.adapter.name)
        if known is None or known.id != adapter_id:
            del self._pool[adapter_id]
            self._reader.drop(adapter_id)

    # --- on the thread -------------------------------------------------------------------------

    def _read(self, entry: _Entry) -> None:
        adapter = entry.adapter
        error: MiniSGLError | None = None
        try:
            facts = self._reader.read(adapter.id, Path(adapter.path))
            if facts != adapter.facts:
                raise ConfigError("its files have changed since it was loaded; load it again")
        except ConfigError as wrong:
            error = InvalidRequest(f"adapter {adapter.name!r}: {wrong}")
        except Exception as failure:
            logger.exception("adapter %r could not be read", adapter.name)
            error = EngineFailure(f"adapter {adapter.name!r} could not be read: {failure}")
        with self._lock:
            waiting, entry.waiting = entry.waiting, {}
            if error is None:
                entry.is_there = True
                entry.holders.update(waiting)
                self._drop_unknown(adapter.id)
            else:
                del self._pool[adapter.id]
                self._reader.drop(adapter.id)
            self._serve_wanted()
            if self._is_closed:
                return
        for request_id, report in waiting.items():
            report(Fetched(request_id, error))


def _check_type(name: object) -> None:
    """In process a caller may give anything as a name."""
    if not isinstance(name, str):
        raise InvalidRequest(f"the name of an adapter must be a string, got {name!r}")


def _shown(name: str) -> str:
    """A name as errors show it; one that is longer than any adapter's is cut."""
    return name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..."
