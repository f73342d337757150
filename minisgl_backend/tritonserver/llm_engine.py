"""The model ``llm_engine``, which Triton loads, calls and unloads: token ids in, token ids out.

The path of a request: ``execute`` -> the lane ``intake``: ``read_request`` ->
``EngineRequests`` makes the engine's request and the stream of its responses -> ``Engine.submit``.
The engine's events go back to the stream, and the ``Dispatcher`` sends them, as packets to the
detokenizer or as token ids to a client of this model alone. Beside that, this module says how the
process is (heartbeat, counts, metrics, the marker of a full queue), and drains the engine when the
model is to be unloaded: the ``UnloadWatcher`` notices it, since Triton calls ``finalize`` only when
the last request has ended. Must not know text, pages or how a step is computed.

Invariants: every Triton request gets its final flag, or the model could not be unloaded; nothing
but Triton errors leaves this module towards Triton.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from minisgl_backend.adapter_options import with_adapters_beside
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import (
    InvalidRequest,
    MiniSGLError,
    Overloaded,
    Unsupported,
    shutting_down,
)
from minisgl_backend.limits import Limits
from minisgl_backend.request import Finished, FinishReason
from minisgl_backend.request_defaults import request_defaults
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_backend.runtime_files import QueueMarker, State, read_adapters, write_adapters
from minisgl_backend.tritonserver.dispatch import Dispatcher
from minisgl_backend.tritonserver.engine_metrics import EngineMetrics
from minisgl_backend.tritonserver.engine_requests import (
    EngineRequests,
    packet_response,
    read_request,
)
from minisgl_backend.tritonserver.lane import Lane
from minisgl_backend.tritonserver.refusals import refusal_of
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.setup import (
    loading,
    own_options,
    ready_url,
    runtime_directory,
)
from minisgl_backend.tritonserver.status import Status, StatusServer
from minisgl_backend.tritonserver.tensors import make_response
from minisgl_backend.tritonserver.unload_watcher import UnloadWatcher
from minisgl_backend.wire.answer import Answer, SampleAnswer, answer_arrays
from minisgl_backend.wire.arrays import text_array
from minisgl_backend.wire.generation import AdapterOrder, Generation, Stopped, StopRequest, Wanted
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart
from minisgl_backend.wire.parameters import LORA_ADAPTERS

logger = logging.getLogger(__name__)

_LAST_STEP_S: Final = 1.0
"""How long the step that runs when the drain is over may take before requests end without it: on a
CPU, a step with a long prompt can take minutes."""
_CANCELLED: Final = Finished(FinishReason.CANCELLED)
_LAST_FLAGS_S: Final = 10.0
"""Time for the last responses once every request has ended."""


class TritonPythonModel:
    """What Triton's Python backend loads, calls and unloads."""

    @staticmethod
    def make_engine(options: EngineOptions) -> EngineBase:
        """The engine for these options."""
        from minisgl_backend.build import build_engine  # brings torch

        return build_engine(options)

    @loading
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; a failure fails Triton's load with its cause."""
        version_folder = Path(args["model_repository"]) / args["model_version"]
        options = with_adapters_beside(own_options(args), version_folder)
        directory = runtime_directory()
        self._options = options
        self._limits = Limits()
        self._defaults = request_defaults(options)
        self._directory = directory
        self._engine = self._make_engine()
        self._metrics = EngineMetrics(
            self._engine, options, version=args["model_version"], directory=directory
        )
        self._intake: Lane[tuple[Any, Responder]] = Lane(self._accept_or_fail, name="intake")
        self._dispatcher = Dispatcher(
            self._engine,
            grace_s=options.cancel_grace_ms / 1000,
            directory=directory,
            on_packet=self._metrics.packet_sent,
            before_end=self._show_queue,
            requests_wait=lambda: not self._intake.is_empty,
        )
        self._requests = EngineRequests(
            self._engine, options, reply_to=self._dispatcher.channel.path
        )
        self._marker = QueueMarker(
            directory,
            f"{args['model_instance_name']}.{args['model_version']}",
            self._engine.most_tokens,
        )
        self._marking = threading.Lock()
        self._watcher = UnloadWatcher(
            ready_url=ready_url(args),
            marker=self._marker,
            report=self._show_queue,
            drain=self._drain,
        )
        self._broken_since_s: float | None = None
        self._orders = ThreadPoolExecutor(1, thread_name_prefix="adapter orders")
        self._status = StatusServer(
            directory, args["model_name"], stats=self.stats, status=self._get_status
        )

    def _make_engine(self) -> EngineBase:
        """The engine, with the adapters that the one before it knew, if it was killed.

        An adapter that can no longer be read is left out: the engine must come back.
        """
        directory = self._directory
        known = None if directory is None else read_adapters(directory)
        if known is None:
            return self.make_engine(self._options)
        engine = self.make_engine(replace(self._options, multi_lora=None, lora_modules=None))
        for name, path in known.items():
            try:
                engine.adapters.load(name, path)
            except MiniSGLError as error:
                logger.error("not loaded again: %s", error)
        return engine

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine; their responses follow through their response senders."""
        for request in requests:
            self._intake.put((request, Responder(request, self._status)))

    def is_ready(self) -> bool:
        """Whether requests are served; newer versions of Triton ask this."""
        return self._engine.health().ready

    def finalize(self) -> None:
        """End the requests in flight, then all threads; nothing of this model is left."""
        self._watcher.close()
        self._intake.close()
        self._orders.shutdown()
        self._drain()
        self._engine.close(drain_s=0)
        self._dispatcher.close()
        self._metrics.close()
        self._status.close()

    # --- requests ----------------------------------------------------------------------------

    def _accept_or_fail(self, waiting: tuple[Any, Responder]) -> None:
        request, responder = waiting
        try:
            self._accept(request, responder)
        except Exception as error:
            responder.fail(error)

    def _accept(self, request: Any, responder: Responder) -> None:
        with self._counting_refusals():
            parsed, direct = read_request(request, self._limits, self._defaults)
        if isinstance(parsed, AdapterOrder):
            if parsed.only_lists:  # waits for no adapter that is being loaded
                self._carry_out(parsed, responder)
            else:
                self._orders.submit(self._carry_out, parsed, responder)
        elif isinstance(parsed, StopRequest):
            self._stop(responder)
            self._answer_cancelled(
                replace(parsed.wanted, finish_reason=True), responder, direct=direct
            )
        elif isinstance(parsed, Stopped):
            self._engine.count_cancelled()
            self._answer_cancelled(parsed.wanted, responder, direct=direct, n=parsed.n)
        else:
            self._generate(parsed, responder, direct=direct)

    def _generate(self, generation: Generation, responder: Responder, *, direct: bool) -> None:
        key = self._dispatcher.new_key()
        stream = self._requests.stream(generation, responder, key, direct=direct)
        with self._counting_refusals():
            samples = self._requests.samples(generation, stream)
        sinks = self._dispatcher.open(stream)
        try:
            self._engine.submit_samples(samples, sinks)
        except Exception:  # usually a refusal; in any case no event will come for the stream
            self._dispatcher.discard(stream)
            raise
        if stream.is_muted:  # given up before the engine knew its request
            self._dispatcher.abort(stream)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        """Count what is refused inside, before ``submit_samples``, which counts for itself."""
        try:
            yield
        except MiniSGLError as error:
            if reason := refusal_of(error):
                self._engine.count_refused(reason)
            raise

    def _carry_out(self, order: AdapterOrder, responder: Responder) -> None:
        """Load or unload an adapter, and answer with the list of all."""
        try:
            if not (order.only_lists or self._options.lora_updates):
                raise Unsupported("adapters stay as they are without the option lora_updates")
            if order.load is not None:
                self._engine.adapters.load(*order.load)
            if order.unload is not None:
                self._engine.adapters.unload(order.unload)
            has_any = self._engine.takes_adapters
            known = self._engine.adapters.known().values() if has_any else ()
            if not order.only_lists:
                self._remember({each.name: each.path for each in known})
            listed = json.dumps([{"name": each.name, "path": each.path} for each in known])
            response = make_response({LORA_ADAPTERS.name: text_array(listed)})
        except Exception as error:
            responder.fail(error)
        else:
            responder.send(response, final=True)

    def _remember(self, paths: Mapping[str, str]) -> None:
        if self._directory is not None:
            try:
                write_adapters(self._directory, paths)
            except OSError as error:  # a full disk, or the directory was removed
                logger.warning("a fault of the engine would forget adapters: %s", error)

    def _stop(self, responder: Responder) -> None:
        """Cancel the requests that have the same id."""
        if not responder.label:
            raise InvalidRequest("stop_request needs the request id of what it stops")
        streams = self._dispatcher.labelled(responder.label)
        if not streams and not self._engine.health().ready:
            # a stop_request that matches nothing is a health probe, as the gateway sends it
            raise Overloaded("the engine takes no requests")
        for stream in streams:
            self._dispatcher.abort(stream)

    def _answer_cancelled(
        self, wanted: Wanted, responder: Responder, *, direct: bool, n: int = 1
    ) -> None:
        """Answer a request for ``n`` samples that the engine does not know: it is cancelled."""
        if direct:
            answer = Answer(samples=[SampleAnswer(finish=FinishReason.CANCELLED)] * n)
            response = make_response(answer_arrays(answer, wanted))
        else:
            packet = Packet(
                self._dispatcher.channel.path,
                self._dispatcher.new_key(),
                index=0,
                deltas=[SampleDelta(finish=_CANCELLED, sample=sample) for sample in range(n)],
                start=StreamStart(num_input_tokens=0, wanted=wanted, num_samples=n, n=n),
                is_last=True,
            )
            response = packet_response(packet)
        responder.send(response, final=True)

    # --- how the process is ------------------------------------------------------------------

    def stats(self) -> Mapping[str, Any]:
        """Counts of the engine and its streams, and facts about the engine."""
        return {
            **asdict(self._engine.stats()),
            "num_streams": len(self._dispatcher),
            "num_lost_streams": self._dispatcher.num_lost,
            "num_detokenizers": self._dispatcher.channel.num_peers,
            "info": asdict(self._engine.info),
            "replicas": [asdict(replica) for replica in self._engine.replicas()],
        }

    def _get_status(self) -> Status:
        health = self._engine.health()
        state = health.state
        if state is State.BROKEN and not self._has_told_all():
            state = State.ENDING
        return Status(health.tick_age_s, state)

    def _has_told_all(self) -> bool:
        """Whether the last responses and metrics of the broken engine are sent, or are overdue.

        A broken process is killed at once. Requests in it would be lost, and tritonserver may abort
        or hang if a metric is under way.
        """
        now_s = time.monotonic()
        self._broken_since_s = self._broken_since_s or now_s
        if now_s - self._broken_since_s > _LAST_FLAGS_S:
            return True
        return not len(self._dispatcher) and self._metrics.stop()

    def _show_queue(self) -> None:
        with self._marking:  # so that the marker shows the latest lookup
            self._marker.show(self._engine.is_queue_full())

    def _drain(self) -> None:
        """Give open requests the time the operator granted, then end the rest with an error."""
        drain_s = self._options.drain_timeout_s
        has_ended = self._engine.close(drain_s=drain_s, patience_s=_LAST_STEP_S)
        if not has_ended and len(self._dispatcher):
            logger.warning("the engine is in a long step: its requests end without it")
            self._dispatcher.end_all(shutting_down())
        if not self._dispatcher.wait_empty(_LAST_FLAGS_S):
            logger.error("%d requests did not get their last response", len(self._dispatcher))
        self._marker.remove()
