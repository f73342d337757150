"""Several replicas as one engine: each request is routed to one of them.

Knows what the replicas have cached and how busy they are, from their updates (``routing``), and all
open requests. Must not know processes, tensors or Triton.

A request is routed when it is accepted, and waits at its replica. If the replica ends, a request
whose caller has been told nothing yet goes to another replica, with all its samples, once; other
requests fail. So a request that breaks replicas breaks two at most. If there is no other replica,
the caller may try again.

Invariants: every accepted request gets exactly one terminal event. Events of a request are
delivered in order, by the thread of the replica that has it. The lock of ``_changed`` guards the
router, the cache index and the open requests; no sink is called while it is held.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from minisgl_backend.adapter_options import adapter_tasks
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure, EngineLost, Recovering, shutting_down
from minisgl_backend.replicas.adapters import ReplicatedAdapters
from minisgl_backend.replicas.counts import ReplicaCounts
from minisgl_backend.replicas.messages import (
    Message,
    Update,
    decode_event,
    decode_observations,
    decode_stats,
    encode_event,
    encode_request,
)
from minisgl_backend.request import (
    AdapterFacts,
    Admitted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Generated,
    Request,
    RequestId,
    Sink,
    TerminalEvent,
    TokenId,
)
from minisgl_backend.routing.cache_index import CacheIndex
from minisgl_backend.routing.router import Balance, Placement, ReplicaCapacity, Router
from minisgl_backend.runtime.engine_base import EngineBase, EngineInfo, Health, ReplicaStats
from minisgl_backend.runtime.open_requests import OpenRequest
from minisgl_backend.runtime.recorder import EngineStats, Observations
from minisgl_backend.runtime_files import State

logger = logging.getLogger(__name__)

_MOST_MOVES: Final = 1


class Replica(Protocol):
    """A replica as seen from here: ``ReplicaProcess`` documents the members in full."""

    pid: int | None
    num_starts: int

    def send(self, message: Message) -> None: ...

    def stop(self) -> None: ...

    def close(self, patience_s: float | None = None) -> None: ...


@dataclass(slots=True, eq=False)
class _Prompt:
    """The samples of a prompt that have not ended; all are at the same replica.

    ``has_told``: the caller knows more than that it was admitted.
    """

    request: Request
    placement: Placement
    samples: dict[RequestId, _Sample] = field(default_factory=dict)
    has_told: bool = False
    num_moves: int = 0


@dataclass(slots=True, eq=False)
class _Sample:
    """The token that comes ``num_until_page`` tokens from now begins a page, or is the sample's
    first. ``end`` is the event with which the sample was aborted, if it was."""

    entry: OpenRequest
    prompt: _Prompt
    num_until_page: int = 1
    num_positions: int = 0
    """The prompt's tokens and the sample's own, up to the last one at such a place."""
    end: TerminalEvent | None = None


class _Tokens(NamedTuple):
    """Common tokens of requests."""

    entries: list[OpenRequest]
    token_ids: list[list[TokenId]]


_Delivery: TypeAlias = tuple[Sink, Event] | _Tokens


class ReplicatedEngine(EngineBase):
    """Routes requests to replicas of one model, which are added once they are loaded."""

    def __init__(
        self, infos: Sequence[EngineInfo], replicas: Sequence[Replica], options: EngineOptions
    ) -> None:
        """``infos`` are those of the ``replicas``, all of which serve; ``options`` those of the
        whole engine."""
        num_pages = [info.num_pages for info in infos]
        first = infos[0]
        self._loaded: ReplicatedAdapters | None = None
        if options.enable_lora:
            self._loaded = ReplicatedAdapters(replicas, tasks=adapter_tasks(options))
        super().__init__(
            replace(
                first,
                num_pages=min(num_pages),
                num_replicas=len(infos),
                max_queued_requests=options.max_queued_requests,
                max_queued_tokens=options.max_queued_tokens,
            ),
            self._loaded,
        )
        self._cache_index = CacheIndex(
            len(infos), max(num_pages), max(info.num_host_slots for info in infos)
        )
        self._router = Router(
            self._cache_index,
            page_size=first.page_size,
            capacity=ReplicaCapacity(
                first.max_running_requests, options.max_prefill_tokens, min(num_pages)
            ),
            balance=_balance(options),
            num_adapter_slots=options.max_loras if options.enable_lora else 0,
        )
        self._replicas = replicas
        self._counts = [ReplicaCounts() for _ in infos]
        self._is_up = [True] * len(infos)
        self._is_gone = [False] * len(infos)
        self._open: dict[RequestId, _Sample] = {}

    # --- callers -----------------------------------------------------------------------------

    def abort(
        self, request_id: RequestId, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        with self._changed:
            sample = self._open.get(request_id)
            if sample is not None and sample.end is None:
                sample.end = Finished(why) if isinstance(why, FinishReason) else Failed(why)
                self._send_abort(sample)

    def stats(self) -> EngineStats:
        with self._lock:
            of_all = EngineStats.sum([counts.total() for counts in self._counts])
            own = self._recorder.snapshot(of_all.scheduler, self._num_open)
        # how requests end is counted here: one that moves to another replica has not ended
        return replace(
            of_all,
            num_open=own.num_open,
            num_cancelled=own.num_cancelled,
            rejected=own.rejected,
            failed=own.failed,
        )

    def replicas(self) -> Sequence[ReplicaStats]:
        with self._lock:
            return [
                ReplicaStats(
                    is_up=is_up,
                    pid=replica.pid,
                    num_starts=replica.num_starts,
                    num_routed=num_routed,
                    stats=counts.total(),
                )
                for replica, is_up, num_routed, counts in zip(
                    self._replicas, self._is_up, self._router.num_routed, self._counts, strict=True
                )
            ]

    def take_observations(self) -> Observations:
        return self._recorder.take_observations()

    def health(self) -> Health:
        state = self._state
        if state is State.SERVING and not any(self._is_up):
            state = State.BROKEN if all(self._is_gone) else State.LOADING
        return Health(state, 0.0)

    def close(self, *, drain_s: float, patience_s: float | None = None) -> bool:
        self._drain(drain_s)
        if self._loaded is not None:
            self._loaded.close()
        for replica in self._replicas:
            replica.stop()
        end_s = None if patience_s is None else time.monotonic() + patience_s
        for replica in self._replicas:
            replica.close(None if end_s is None else max(0.0, end_s - time.monotonic()))
        with self._changed:
            ends = [self._end(sample, Failed(shutting_down())) for sample in [*self._open.values()]]
        self._deliver(ends)
        return True

    def _check_open(self) -> None:
        super()._check_open()
        if not any(self._is_up):
            self._recorder.request_refused("down")
            raise _recovering()

    def _enter(self, entries: Sequence[OpenRequest]) -> None:
        request = entries[0].request
        prompt = _Prompt(request, self._place(request, len(entries)))
        for entry in entries:
            sample = _Sample(entry, prompt, num_positions=len(request.prompt))
            self._open[entry.request.id] = prompt.samples[entry.request.id] = sample
        self._send(prompt)

    # --- the threads of the replicas ---------------------------------------------------------

    def joined(self, replica: int) -> None:
        """A replica serves from now on."""
        with self._changed:
            if self._loaded is None or self._loaded.joined(replica):
                self._join(replica)

    def take(self, replica: int, message: Message) -> None:
        """Take updates and counts of a replica."""
        events: list[_Delivery] = []
        try:
            with self._changed:
                if "stats" in message:
                    self._counts[replica].now = decode_stats(message["stats"])
                for update in message.get("updates", ()):
                    self._take_update(replica, update, events)
        finally:  # if one breaks the bookkeeping, the requests that ended before it are forgotten
            self._deliver(events)
        if "observations" in message:
            self._recorder.add_observations(decode_observations(message["observations"]))

    def lost(self, replica: int, *, is_last: bool) -> None:
        """A replica has ended, with everything that it had."""
        with self._changed:
            self._leave(replica)
            self._is_gone[replica] = is_last
            self._counts[replica].end()
            self._cache_index.forget(replica)
            if self._is_told_to_stop:
                return  # ``close`` ends its requests
            prompts = dict.fromkeys(sample.prompt for sample in self._open.values())
            orphans = [prompt for prompt in prompts if prompt.placement.replica == replica]
            for prompt in orphans:
                self._router.end(prompt.placement)
            ends = [end for prompt in orphans for end in self._move(prompt)]
        self._deliver(ends)

    def _take_update(self, replica: int, update: Update, events: list[_Delivery]) -> None:
        match update:
            case ["t", ids, token_ids]:
                events.append(self._take_tokens(ids, token_ids))
            case ["+" | "h+" as word, keys, pages]:
                self._cache_index.publish(
                    replica,
                    np.array(keys, np.uint64),
                    np.array(pages, np.int32),
                    in_host=word == "h+",
                )
            case ["-" | "h-" as word, pages]:
                self._cache_index.evict(replica, np.array(pages, np.int32), in_host=word == "h-")
            case ["0"]:
                self._cache_index.forget(replica)
            case ["l", adapter_id, answer]:
                assert self._loaded is not None
                given = answer if isinstance(answer, str) else AdapterFacts(*answer)
                if self._loaded.answered(replica, adapter_id, given):
                    self._join(replica)
            case _:
                sample = self._open.get(RequestId(update[1]))
                if sample is not None:
                    events.extend(self._take_event(replica, sample, decode_event(update)))

    def _take_tokens(self, ids: Sequence[RequestId], token_ids: Sequence[list[TokenId]]) -> _Tokens:
        """Take common tokens: with many replicas, this is most of what this process does."""
        tokens, grown = _Tokens([], []), list[Placement]()
        add_entry, add_token_ids = tokens.entries.append, tokens.token_ids.append
        for sample, own in zip(map(self._open.get, ids), token_ids, strict=True):
            if sample is not None:
                sample.num_until_page -= len(own)
                if sample.num_until_page <= 0:
                    self._turn_pages(sample, grown)
                add_entry(sample.entry)
                add_token_ids(own)
        self._router.grow(grown)
        return tokens

    def _turn_pages(self, sample: _Sample, grown: list[Placement]) -> None:
        """A token has come that begins a page, or the first of the sample. Its placement goes to
        ``grown`` for each new page."""
        prompt, page_size = sample.prompt, self.info.page_size
        prompt.has_told = True
        self._router.computed(prompt.placement)
        while sample.num_until_page <= 0:
            place = sample.num_positions % page_size
            if not place:
                grown.append(prompt.placement)
            sample.num_positions += page_size - place
            sample.num_until_page += page_size - place

    def _take_event(
        self, replica: int, sample: _Sample, event: Event
    ) -> Sequence[tuple[Sink, Event]]:
        entry = sample.entry
        if isinstance(event, Admitted):
            if entry.admitted:  # it has moved
                return ()
            entry.admitted = True
            self._forget_waiting(entry.request)
        elif isinstance(event, Generated):
            grown: list[Placement] = []
            sample.num_until_page -= 1
            if sample.num_until_page <= 0:
                self._turn_pages(sample, grown)
            self._router.grow(grown)
        elif isinstance(event, Failed) and isinstance(event.error, EngineLost):
            self._leave(replica)  # its process is about to end, and then this request goes on
            return ()
        else:
            sample.prompt.has_told = True
            if isinstance(event, TerminalEvent):
                return [self._end(sample, event)]
        return [(entry.sink, event)]

    # --- while the lock is held --------------------------------------------------------------

    def _place(self, request: Request, num_samples: int) -> Placement:
        """Choose a replica; one is up."""
        placement = self._router.route(
            request.prompt,
            request.cache_key,
            num_rows=num_samples,
            adapter_id=None if request.adapter is None else request.adapter.id,
        )
        assert placement is not None
        return placement

    def _send(self, prompt: _Prompt) -> None:
        message = encode_request(prompt.request, list(prompt.samples))
        self._replicas[prompt.placement.replica].send(message)

    def _send_abort(self, sample: _Sample) -> None:
        assert sample.end is not None
        end = encode_event(sample.entry.request.id, sample.end)
        self._replicas[sample.prompt.placement.replica].send({"abort": end})

    def _join(self, replica: int) -> None:
        self._is_up[replica] = True
        self._router.join(replica)

    def _leave(self, replica: int) -> None:
        self._is_up[replica] = False
        self._router.leave(replica)
        if self._loaded is not None:
            self._loaded.lost(replica)

    def _move(self, prompt: _Prompt) -> list[tuple[Sink, Event]]:
        """Send a request of a lost replica to another one; else returns how its samples end.

        If it may move but has nowhere to go, its caller may send it again once a replica is back.
        """
        samples = list(prompt.samples.values())
        may_move = not prompt.has_told and prompt.num_moves < _MOST_MOVES
        if may_move and any(self._is_up):
            prompt.num_moves += 1
            prompt.placement = self._place(prompt.request, len(samples))
            self._send(prompt)
            for sample in samples:
                if sample.end is not None:
                    self._send_abort(sample)
            return []
        lost = EngineFailure("the replica that served the request has ended")
        error = Failed(_recovering() if may_move else lost)
        return [self._end(sample, sample.end or error, is_placed=False) for sample in samples]

    def _end(
        self, sample: _Sample, event: TerminalEvent, *, is_placed: bool = True
    ) -> tuple[Sink, Event]:
        """Forget a request, and count it; returns the delivery that is due."""
        entry, prompt = sample.entry, sample.prompt
        del self._open[entry.request.id], prompt.samples[entry.request.id]
        if is_placed and not prompt.samples:
            self._router.end(prompt.placement)
        if isinstance(event, Failed):
            self._recorder.request_failed(event.error.code)
        elif event.reason is FinishReason.CANCELLED:
            self._recorder.request_cancelled()
        # before the event, so that its receiver finds the request's place in the queue free
        self._forget(entry.request, entry.admitted)
        return entry.sink, event

    def _deliver(self, deliveries: Sequence[_Delivery]) -> None:
        """Call sinks; the lock is not held."""
        for delivery in deliveries:
            if not isinstance(delivery, _Tokens):
                self._call(*delivery)
                continue
            for entry, token_ids in zip(delivery.entries, delivery.token_ids, strict=True):
                buffer = entry.buffer
                if buffer is None:
                    for token_id in token_ids:
                        self._call(entry.sink, Generated(token_id))
                    continue
                buffer.tokens += token_ids
                if buffer.is_awaited:
                    self._call(buffer.wake)

    def _call(self, sink: Callable[..., None], *event: Event) -> None:
        try:
            sink(*event)
        except Exception:  # a sink belongs to one request, so its failure must not reach the others
            logger.exception("a sink failed on %s", event[0] if event else "a token")


def _balance(options: EngineOptions) -> Balance:
    given = {"ratio": options.routing_ratio, "slack": options.routing_slack}
    return Balance(**{name: value for name, value in given.items() if value is not None})


def _recovering() -> Recovering:
    return Recovering("the replicas of the engine are being loaded again")
