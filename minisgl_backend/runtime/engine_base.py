"""What callers see of an engine, whether it runs in this process or in several replicas.

``EngineBase`` accepts or refuses requests. It knows the limits of one request (context, vocabulary,
pages), those of the queue, and which adapters there are. ``runtime.engine.Engine`` runs a loop;
``replicas.replicated_engine.ReplicatedEngine`` routes requests to replicas. Must not know how
requests are served, Triton or text.

A request that cannot be served is refused at once: ``submit`` raises. A request that is accepted
gets exactly one terminal event through its sink. All methods may be called from any thread.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl_backend.errors import (
    EngineFailure,
    InvalidRequest,
    Overloaded,
    Unsupported,
    shutting_down,
)
from minisgl_backend.request import (
    Adapter,
    FinishReason,
    Request,
    RequestId,
    SamplingParams,
    Sink,
)
from minisgl_backend.runtime.adapters import AdapterNames
from minisgl_backend.runtime.capacity import Capacity
from minisgl_backend.runtime.open_requests import OpenRequest
from minisgl_backend.runtime.recorder import EngineStats, Observations, Recorder, Refusal
from minisgl_backend.runtime_files import State
from minisgl_backend.token_buffer import BufferedSink


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that are fixed once the model is loaded. Lengths and sizes are in tokens.

    ``weights`` says how the checkpoint stores them. Unless it ``generates``, the model has no
    output head and only embeds prompts. These are None if the model does not have them:
    ``num_snapshots`` of recurrent states, ``num_window_pages`` of layers whose largest window is
    ``window``, and ``section``, the size of sections of attention. Main memory keeps up to
    ``num_host_slots`` pages, ``num_window_slots`` window pages and ``num_state_slots`` snapshots.
    If it ``reads_groups``, attention reads the pages that decoding rows share together. With
    several replicas, the limits of the queue hold for all together, everything else for each.
    """

    model: str
    folder: str
    architecture: str
    device: str
    dtype: str
    weights: str
    attention_backend: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_sequence_length: int
    page_size: int
    num_pages: int
    max_running_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_time_s: float | None = None
    num_snapshots: int | None = None
    num_window_pages: int | None = None
    num_host_slots: int = 0
    num_window_slots: int = 0
    num_state_slots: int = 0
    window: int | None = None
    section: int | None = None
    generates: bool = True
    reads_groups: bool = False
    num_replicas: int = 1

    @property
    def most_running(self) -> int:
        """Requests that run at the same time, over all replicas."""
        return self.max_running_requests * self.num_replicas

    @property
    def most_open(self) -> int:
        """Requests that run or wait."""
        return self.most_running + self.max_queued_requests

    def queue_complaint(
        self, *, num_samples: int, num_tokens: int, num_open: int, num_waiting_tokens: int
    ) -> str | None:
        """Why ``num_samples`` samples of a prompt of ``num_tokens`` may not be queued while
        ``num_open`` requests are open, whose waiting prompts have ``num_waiting_tokens``; None if
        they may."""
        if num_open + num_samples > self.most_open:
            return (
                f"queue full: {num_open} requests open of at most {self.most_open} "
                f"({self.most_running} running, {self.max_queued_requests} queued)"
            )
        if num_waiting_tokens and num_waiting_tokens + num_tokens > self.max_queued_tokens:
            return (
                f"queue full: {num_waiting_tokens} prompt tokens wait, and {num_tokens} more "
                f"exceed {self.max_queued_tokens}"
            )
        return None


@dataclass(frozen=True, slots=True)
class Health:
    """The state of the engine, and the time since its loop last gave a sign of life."""

    state: State
    tick_age_s: float

    @property
    def ready(self) -> bool:
        """Whether requests are served."""
        return self.state is State.SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One of several replicas. ``stats`` are totals of all its processes so far, of which there
    were ``num_starts``; ``pid`` is None while none serves."""

    is_up: bool
    pid: int | None
    num_starts: int
    num_routed: int
    """Number of requests that have been routed to it."""
    stats: EngineStats


class EngineBase(ABC):
    """Accepts or refuses requests; subclasses serve those that it accepts."""

    def __init__(self, info: EngineInfo, adapters: AdapterNames | None = None) -> None:
        """``adapters`` is None if requests may name none."""
        self.info = info
        self._adapters = adapters
        self._capacity = Capacity(
            max_sequence_length=info.max_sequence_length,
            num_pages=info.num_pages,
            page_size=info.page_size,
        )
        self._recorder = Recorder()
        self._ids = itertools.count(1)
        # a main thread takes the lock, not the condition: Ctrl-C cannot come between acquiring a
        # lock and entering its ``with`` block, but with a condition it can
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._state = State.SERVING
        self._num_open = 0
        self._num_waiting_tokens = 0
        self._is_told_to_stop = False

    @abstractmethod
    def _enter(self, entries: Sequence[OpenRequest]) -> None:
        """Take the accepted samples of a prompt; the lock of ``_changed`` is held."""

    @abstractmethod
    def abort(
        self, request_id: RequestId, why: FinishReason | EngineFailure = FinishReason.CANCELLED
    ) -> None:
        """End a request: its sink gets ``Finished(why)``, or ``Failed(why)`` if it is an error.

        Ids of requests that are not open are ignored.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Counts at this moment, in constant time."""

    @abstractmethod
    def take_observations(self) -> Observations:
        """The observations for histograms since the last call."""

    @abstractmethod
    def health(self) -> Health:
        """Whether requests are served, in constant time and without waiting."""

    @abstractmethod
    def close(self, *, drain_s: float, patience_s: float | None = None) -> bool:
        """Refuse new requests, give the open ones ``drain_s`` to finish, and stop.

        Requests that are still open then fail. When this returns True, every request has had its
        terminal event, and the devices are freed. Idempotent; later calls do not drain.

        A running step cannot be interrupted. With ``patience_s``, returns False if it still runs
        that long after the drain; the engine then ends with the step.
        """

    def replicas(self) -> Sequence[ReplicaStats]:
        """The counts of each replica; none if there is one engine only."""
        return ()

    @property
    def most_tokens(self) -> int:
        """The most tokens of a prompt and its answer, by the context and by the pages."""
        return self._capacity.most_tokens(num_prompt_tokens=0)

    def new_id(self) -> RequestId:
        """A number that no other request of this engine has."""
        return RequestId(next(self._ids))

    def submit(self, request: Request, sink: Sink) -> None:
        """Accept a request; ``sink`` gets its events on the engine's thread.

        Raises ``InvalidRequest`` if the request can never be served, and ``Overloaded`` if the
        queue is full or the engine is not serving.
        """
        self.submit_samples([request], [sink])

    def submit_samples(self, samples: Sequence[Request], sinks: Sequence[Sink]) -> None:
        """Accept all samples of a prompt (``samples_of``), or none: see ``submit``.

        Each has its own events and end, and counts as an open request. The tokens of the prompt
        count once, with the first sample.
        """
        first = samples[0]
        try:
            self.check(first, num_samples=len(samples))
        except InvalidRequest:
            self._recorder.request_refused("invalid")
            raise
        num_tokens, now_s = len(first.prompt), time.monotonic()
        entries = []
        for request, sink in zip(samples, sinks, strict=True):
            entry = OpenRequest(self._with_eos(request), sink, now_s)
            if isinstance(sink, BufferedSink):
                entry.buffer = sink.buffer
            entries.append(entry)
        with self._changed:
            self._check_open()
            if complaint := self._queue_complaint(num_samples=len(samples), num_tokens=num_tokens):
                self._recorder.request_refused("queue_full")
                raise Overloaded(complaint)
            self._num_open += len(samples)
            self._num_waiting_tokens += num_tokens
            self._enter(entries)

    def check(self, request: Request, num_samples: int = 1) -> None:
        """Raise ``InvalidRequest`` if ``num_samples`` samples of the request can never be served,
        as ``submit_samples`` does."""
        info, sampling = self.info, request.sampling
        prompt = request.prompt
        # one pass, as it may be long; as unsigned numbers, negative ones are large
        if prompt.view(np.uint32).max(initial=0) >= info.vocab_size:
            _check_ids("input_ids", prompt.tolist(), info.vocab_size)
        _check_ids("stop_token_ids", sampling.stop_token_ids, info.vocab_size)
        _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], info.vocab_size)
        # ``wire.parse`` checks the same; some requests do not come through it
        if not (sampling.embed or info.generates):
            raise InvalidRequest("embed must be true: the checkpoint has no output head")
        if sampling.num_prompt_logprobs is not None and not info.generates:
            raise InvalidRequest(
                "num_prompt_logprobs needs an output head: the checkpoint has none"
            )
        if sampling.embed and sampling.max_tokens:
            raise InvalidRequest(f"max_tokens must be 0 with embed, got {sampling.max_tokens}")
        if sampling.embed and num_samples > 1:
            raise InvalidRequest(f"n must be 1 with embed, got {num_samples}")
        is_for_prompt = sampling.embed or sampling.num_prompt_logprobs is not None
        if sampling.max_tokens == 0 and not is_for_prompt:
            raise InvalidRequest(
                "max_tokens must be >= 1 without num_prompt_logprobs or embed, got 0"
            )
        if num_samples > info.most_open:
            raise InvalidRequest(
                f"at most {info.most_open} samples fit the engine, "
                f"{info.most_running} running and {info.max_queued_requests} queued, "
                f"got {num_samples}"
            )
        self._capacity.check(num_prompt_tokens=len(prompt), max_tokens=sampling.max_tokens)

    def count_refused(self, reason: Refusal) -> None:
        """Count a request that was refused before it came to ``submit``."""
        self._recorder.request_refused(reason)

    @property
    def adapters(self) -> AdapterNames:
        """The LoRA adapters that requests may name. Raises ``Unsupported`` if they may not."""
        if self._adapters is None:
            raise Unsupported("LoRA feature is not enabled.")
        return self._adapters

    @property
    def takes_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return self._adapters is not None

    def adapter(self, name: str | None, task_id: int | None) -> Adapter | None:
        """The adapter that a request names, by its name or by its number in ``lora_task_ids``.

        Raises ``Unsupported`` and ``InvalidRequest``."""
        if name is not None:
            return self.adapters.find(name)
        return None if task_id is None else self.adapters.of_task(task_id)

    def count_cancelled(self) -> None:
        """Count a request that its caller cancelled before it came to ``submit``."""
        self._recorder.request_cancelled()

    def fitted(self, sampling: SamplingParams, *, num_prompt_tokens: int) -> SamplingParams:
        """``sampling`` with ``max_tokens`` lowered to the room that the prompt leaves.

        If there is no room for a single token, or for ``min_tokens``, ``submit`` refuses it.
        """
        most = self._capacity.most_tokens(num_prompt_tokens)
        least = max(min(1, sampling.max_tokens), sampling.min_tokens)
        return dataclasses.replace(sampling, max_tokens=max(least, min(sampling.max_tokens, most)))

    def is_queue_full(self) -> bool:
        """Whether ``submit`` would refuse a request now: a hint to refuse it before other work."""
        return self._queue_complaint(num_samples=1, num_tokens=1) is not None

    # --- for the subclasses ------------------------------------------------------------------

    def _drain(self, drain_s: float) -> None:
        """Refuse new requests, and wait at most ``drain_s`` until none is open."""
        with self._changed:
            if self._state is State.SERVING:
                self._state = State.ENDING
            self._changed.wait_for(
                lambda: self._num_open == 0 or self._state is State.BROKEN or self._is_told_to_stop,
                timeout=drain_s,
            )
            self._is_told_to_stop = True

    def _forget_waiting(self, request: Request) -> None:
        """A request that waited has a row."""
        if request.leader is None:
            with self._changed:
                self._num_waiting_tokens -= len(request.prompt)

    def _forget(self, request: Request, admitted: bool) -> None:
        """A request has ended; ``admitted`` if it no longer counts as waiting."""
        with self._changed:
            self._num_open -= 1
            if not admitted and request.leader is None:
                self._num_waiting_tokens -= len(request.prompt)
            if not self._num_open:
                self._changed.notify_all()

    # --- the limits --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state is State.SERVING:
            return
        if self._state is State.ENDING:
            self._recorder.request_refused("draining")
            raise shutting_down()
        self._recorder.request_refused("down")
        raise Overloaded("the engine is down")

    def _queue_complaint(self, *, num_samples: int, num_tokens: int) -> str | None:
        return self.info.queue_complaint(
            num_samples=num_samples,
            num_tokens=num_tokens,
            num_open=self._num_open,
            num_waiting_tokens=self._num_waiting_tokens,
        )

    def _with_eos(self, request: Request) -> Request:
        sampling = request.sampling
        if sampling.ignore_eos:
            return request
        ids = dict.fromkeys((*sampling.stop_token_ids, *self.info.eos_token_ids))
        sampling = dataclasses.replace(sampling, stop_token_ids=tuple(ids))
        return dataclasses.replace(request, sampling=sampling)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{name} must be token ids in 0 .. {vocab_size - 1}, got {token_id}"
            )
