"""The model `llm_engine`: token ids in, chunks of token ids out.

Knows Triton's requests and the engine's, and joins them: a request that comes through the tokenizer
brings a ``request`` record, and its chunks go to the detokenizer, acknowledged; a client may also
call this model by itself, with token ids. All work is done elsewhere: ``execute`` only hands over.

Invariants: every Triton request gets its final flag, or the model could not be unloaded; nothing
but Triton errors leaves this module towards Triton.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from minisgl_backend.config import EngineOptions, Limits
from minisgl_backend.errors import InvalidRequest, Overloaded
from minisgl_backend.heartbeat import State
from minisgl_backend.request import Event, Failed, Finished, FinishReason, IntArray, Request
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.text.prompt import TokenPrompt
from minisgl_backend.tritonserver.counts import refusal_of
from minisgl_backend.tritonserver.dispatch import Dispatcher
from minisgl_backend.tritonserver.encoding import ChunkEncoder, TokenEncoder
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.setup import (
    loading,
    own_options,
    ready_url,
    runtime_directory,
)
from minisgl_backend.tritonserver.signs import QueueSign
from minisgl_backend.tritonserver.stream import Outgoing, Stream
from minisgl_backend.tritonserver.telemetry import Telemetry
from minisgl_backend.tritonserver.tensors import (
    Arrays,
    checked_size,
    make_response,
    read_inputs,
    read_parameters,
)
from minisgl_backend.tritonserver.vitals import Condition, Vitals
from minisgl_backend.tritonserver.watch import Watch
from minisgl_backend.tritonserver.window import Window
from minisgl_backend.tritonserver.wire.answer import Answer, answer_arrays
from minisgl_backend.tritonserver.wire.chunk import StreamStart, Times
from minisgl_backend.tritonserver.wire.generation import Generation, StopRequest
from minisgl_backend.tritonserver.wire.parameters import INPUT_IDS, REQUEST
from minisgl_backend.tritonserver.wire.parse import parse_token_generation
from minisgl_backend.tritonserver.wire.record import Record, decode_record

logger = logging.getLogger(__name__)

_STOP_STRINGS_EVERY_S: Final = 0.1
"""How often a request that is answered at its end shows its tokens to the stop strings."""
_LAST_FLAGS_S: Final = 10.0
"""Time for the last responses once every request has ended."""


class TritonPythonModel:
    """What Triton's Python backend loads, calls and unloads."""

    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        """The engine of these options."""
        from minisgl_backend.build import build_engine  # brings torch

        return build_engine(options)

    @loading
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model; a failure fails Triton's load with its cause."""
        options = own_options(args)
        self._options = options
        self._limits = Limits()
        self._seeds = random.Random(options.seed) if options.seed is not None else random.Random()
        self._engine = self.make_engine(options)
        self._telemetry = Telemetry(
            self._engine, model=options.model, version=args["model_version"]
        )
        self._dispatcher = Dispatcher(
            self._engine,
            grace_s=options.cancel_grace_ms / 1000,
            directory=runtime_directory(),
            on_chunk=self._telemetry.chunk_sent,
        )
        self._sign = QueueSign(
            runtime_directory(), f"{args['model_instance_name']}.{args['model_version']}"
        )
        self._showing = threading.Lock()
        self._watch = Watch(
            ready_url=ready_url(args), sign=self._sign, report=self._report, drain=self._drain
        )
        self._broken_since_s: float | None = None
        self._vitals = Vitals(
            runtime_directory(), args["model_name"], stats=self._stats, condition=self._condition
        )

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine; their responses follow through their response senders."""
        for request in requests:
            responder = Responder(request, self._vitals)
            try:
                self._accept(request, responder)
            except Exception as error:
                responder.fail(error)

    def is_ready(self) -> bool:
        """Whether requests are served; newer servers ask."""
        return self._engine.health().ready

    def finalize(self) -> None:
        """End what is in flight, then all threads; nothing of this model is left."""
        self._watch.close()
        self._drain()
        self._dispatcher.close()
        self._telemetry.close()
        self._vitals.close()

    def _condition(self) -> Condition:
        health = self._engine.health()
        state = health.state
        if state is State.BROKEN and not self._have_last_flags_gone():
            state = State.ENDING  # a broken process is ended at once, and requests in it are lost
        return Condition(health.tick_age_s, state)

    def _have_last_flags_gone(self) -> bool:
        """Whether every request of the broken engine has its error, or has had the time for it."""
        now = time.monotonic()
        self._broken_since_s = self._broken_since_s or now
        return not len(self._dispatcher) or now - self._broken_since_s > _LAST_FLAGS_S

    def _stats(self) -> Mapping[str, Any]:
        return {
            **asdict(self._engine.stats()),
            "num_streams": len(self._dispatcher),
            "info": asdict(self._engine.info),
        }

    def _report(self) -> None:
        self._show_queue()
        self._telemetry.report()

    def _show_queue(self) -> None:
        with self._showing:  # so that the sign shows what was looked up last
            self._sign.show(self._engine.is_queue_full())

    def _drain(self) -> None:
        """Give open requests the time the operator granted, then end the rest with an error."""
        self._engine.close(drain_s=self._options.drain_timeout_s)
        if not self._dispatcher.wait_empty(_LAST_FLAGS_S):
            logger.error("%d requests did not get their last response", len(self._dispatcher))
        self._sign.remove()

    # --- requests ----------------------------------------------------------------------------

    def _accept(self, request: Any, responder: Responder) -> None:
        try:
            inputs = read_inputs(request)
            checked_size(request, inputs, self._limits)
            direct = REQUEST.name not in inputs
            asked = self._from_client(request, inputs) if direct else self._from_tokenizer(inputs)
        except Exception as error:
            if reason := refusal_of(error):
                self._engine.count_refused(reason)
            raise
        if isinstance(asked, StopRequest):
            self._stop(asked, responder, direct=direct)
        else:
            self._generate(asked, responder, direct=direct)

    def _from_tokenizer(self, inputs: Arrays) -> Record | StopRequest:
        """What the tokenizer's record says."""
        ids = inputs.get(INPUT_IDS.name)
        if ids is None:
            raise InvalidRequest("request goes with input_ids")
        record = inputs[REQUEST.name].item(0).decode(errors="replace")  # then it is no JSON
        return decode_record(record, ids.reshape(-1), self._limits)

    def _from_client(self, request: Any, inputs: Arrays) -> Record | StopRequest:
        """What a client that calls this model by itself says."""
        arrival_time_ns = time.time_ns()
        parsed = parse_token_generation(
            inputs, read_parameters(request), timeout_us=request.timeout(), limits=self._limits
        )
        if isinstance(parsed, StopRequest):
            return parsed
        return Record(generation=parsed, arrival_time_ns=arrival_time_ns)

    def _generate(self, record: Record, responder: Responder, *, direct: bool) -> None:
        stream = self._stream(record, responder, direct=direct)
        request = self._request(record, stream)
        deliver = self._dispatcher.open(stream)

        def sink(event: Event) -> None:
            try:
                if isinstance(event, Finished | Failed):
                    self._show_queue()  # before its client can ask again
            finally:
                deliver(event)

        try:
            self._engine.submit(request, sink)
        except Exception:  # refused as a rule; whatever it is, nothing will come for the stream
            self._dispatcher.discard(stream)
            raise
        if stream.is_muted:  # given up before the engine knew its request
            self._engine.abort(stream.request_id)

    def _stream(self, record: Record, responder: Responder, *, direct: bool) -> Stream:
        """The way out: as token ids to a client of this model, as chunks to the detokenizer."""
        generation = record.generation
        key = self._dispatcher.new_key()
        num_input_tokens = len(_prompt_ids(generation))
        encode: Callable[[Outgoing], Any]
        if direct:
            encode = TokenEncoder(
                label=responder.label, num_input_tokens=num_input_tokens, wanted=generation.wanted
            )
        else:
            encode = self._chunk_encoder(key, record, num_input_tokens)
        return Stream(
            key=key,
            request_id=self._engine.new_id(),
            responder=responder,
            encode=encode,
            window=Window(now_s=time.monotonic(), interval_s=self._interval_s(generation)),
            acknowledged=not direct,
            arrival_time_ns=record.arrival_time_ns,
            timed=generation.wanted.perf_metrics,
        )

    def _request(self, record: Record, stream: Stream) -> Request:
        """What the engine is asked for."""
        generation, ids = record.generation, _prompt_ids(record.generation)
        seed = generation.seed if generation.seed is not None else self._seeds.getrandbits(64)
        sampling = replace(generation.sampling, seed=seed)
        if generation.fit_max_tokens:
            sampling = self._engine.fitted(sampling, num_prompt_tokens=len(ids))
        return Request(
            id=stream.request_id,
            prompt=ids,
            sampling=sampling,
            priority=generation.priority,
            deadline_s=_deadline_s(generation.timeout_ms, record.arrival_time_ns),
            cache_salt=generation.cache_salt,
            label=stream.responder.label,
        )

    def _chunk_encoder(self, key: int, record: Record, num_input_tokens: int) -> ChunkEncoder:
        return ChunkEncoder(
            reply_to=self._dispatcher.channel.path,
            key=key,
            start=StreamStart.of(
                record.generation,
                num_input_tokens=num_input_tokens,
                eos_token_ids=self._engine.info.eos_token_ids,
                prompt_text=record.prompt_text,
            ),
        )

    def _interval_s(self, generation: Generation) -> float:
        if not generation.stream:
            return _STOP_STRINGS_EVERY_S if generation.stop_strings else float("inf")
        asked = generation.min_chunk_interval_ms
        return (asked if asked is not None else self._options.min_chunk_interval_ms) / 1000

    def _stop(self, request: StopRequest, responder: Responder, *, direct: bool) -> None:
        """Cancel the requests that bear the same id, and say so."""
        if not responder.label:
            raise InvalidRequest("stop_request needs the request id of what it stops")
        streams = self._dispatcher.labelled(responder.label)
        if not streams and not self._engine.health().ready:
            # a stop_request that matches nothing is a probe of health, as the gateway sends it
            raise Overloaded("the engine takes no requests")
        for stream in streams:
            self._engine.abort(stream.request_id)
        wanted = replace(request.wanted, finish_reason=True)
        if direct:
            answer = Answer(finish=FinishReason.CANCELLED)
            responder.send(make_response(answer_arrays(answer, wanted)), final=True)
            return
        encode = ChunkEncoder(
            reply_to=self._dispatcher.channel.path,
            key=self._dispatcher.new_key(),
            start=StreamStart(num_input_tokens=0, wanted=wanted),
        )
        outgoing = Outgoing(
            index=0,
            token_ids=[],
            logprobs=(),
            num_cached_tokens=None,
            times=Times(time.time_ns()),
            terminal=Finished(FinishReason.CANCELLED),
        )
        responder.send(encode(outgoing), final=True)


def _prompt_ids(generation: Generation) -> IntArray:
    """int32[num_prompt_tokens]; whatever the prompt was, it comes here as token ids."""
    assert isinstance(generation.prompt, TokenPrompt)
    return generation.prompt.ids


def _deadline_s(timeout_ms: int | None, arrival_time_ns: int) -> float | None:
    """The deadline on the clock of ``time.monotonic``; the request arrived in another process."""
    if timeout_ms is None:
        return None
    age_s = max(0, time.time_ns() - arrival_time_ns) / 1e9
    return time.monotonic() - age_s + timeout_ms / 1000
