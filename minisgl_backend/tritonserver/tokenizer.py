"""The model ``tokenizer``: text, chats or token ids in, token ids and a validated request out.

A client that calls this model directly can get more: the tokens as the vocabulary spells them,
their text, the context, and what a chat's template reveals about the answer. Such a lookup needs no
engine: no full queue refuses it, and its text may be longer than the context.

Knows every parameter of the wire (through ``wire``) and refuses a request before any work is done
for it: first if the engines' markers say that all queues are full, then by its size, its values,
and the text itself. Tokenizing runs on a pool of threads, so that a long prompt does not hold up
other requests; the number of requests in the pool is bounded. A request without a prompt, such as a
``stop_request``, is handled at once however full the queues are: it makes room. Must not know pages
or steps, or anything about an engine but its marker.

Invariants: every request gets exactly one response with the final flag. A ``stop_request`` never
overtakes what it stops: requests of its id that are still in the pool end here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from minisgl_backend.errors import Overloaded, Recovering
from minisgl_backend.limits import Limits
from minisgl_backend.prompt_encoder import load_encoder
from minisgl_backend.request import EMPTY, IntArray
from minisgl_backend.request_defaults import request_defaults
from minisgl_backend.runtime_files import MarkerReader
from minisgl_backend.text.chat_format import ChatFormat
from minisgl_backend.text.tokenizer import RenderedChat
from minisgl_backend.tritonserver.refusals import Refusals
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.setup import (
    engine_options,
    loading,
    runtime_directory,
)
from minisgl_backend.tritonserver.status import StatusServer
from minisgl_backend.tritonserver.tensors import (
    Arrays,
    checked_size,
    make_response,
    read_inputs,
    read_parameters,
)
from minisgl_backend.wire.arrays import text_array, texts_array
from minisgl_backend.wire.generation import Generation, Stopped, StopRequest
from minisgl_backend.wire.parameters import (
    CHAT_FORMAT,
    INPUT_IDS,
    LOOKUPS,
    MAX_SEQUENCE_LENGTH,
    REQUEST,
    TEXT,
    TOKEN_STRS,
)
from minisgl_backend.wire.parse import PROMPTS, parse_generation
from minisgl_backend.wire.record import encode_record

logger = logging.getLogger(__name__)

_AT_ONCE_BYTES: Final = 4096
"""A larger request goes through the pool, with a prompt or without."""


@dataclass(slots=True, eq=False)
class _Job:
    """A request in the pool."""

    inputs: Arrays
    parameters: Mapping[str, Any]
    timeout_us: int
    responder: Responder
    is_lookup: bool
    arrival_time_ns: int = field(default_factory=time.time_ns)
    stopped: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)
    """Held while sending and while setting ``stopped``, so that a stop never overtakes its request.
    """


class TritonPythonModel:
    """What Triton's Python backend loads, calls and unloads."""

    @loading
    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the tokenizer and its chat template."""
        options = engine_options(args)
        self._limits = Limits()
        self._defaults = request_defaults(options)
        self._encoder = load_encoder(options, self._limits)
        self._markers = MarkerReader(runtime_directory())
        most_running = options.data_parallel_size * options.max_running_requests
        self._max_jobs = most_running + options.max_queued_requests
        self._max_bytes = 8 * self._limits.prompt_bytes
        self._refusals = Refusals(model=options.model, version=args["model_version"])
        self._lock = threading.Lock()
        self._jobs: set[_Job] = set()
        self._num_bytes = 0
        self._pool = ThreadPoolExecutor(options.num_tokenizers, thread_name_prefix="tokenizer")
        self._status = StatusServer(runtime_directory(), args["model_name"], stats=self.stats)

    def execute(self, requests: list[Any]) -> None:
        """Queue requests for the pool, or refuse them at once."""
        for request in requests:
            responder = Responder(request, self._status)
            try:
                self._queue_job(request, responder)
            except Exception as error:
                self._refuse(responder, error)

    def finalize(self) -> None:
        """End the pool; Triton calls this once all requests are answered."""
        self._pool.shutdown()
        self._refusals.close()
        self._status.close()

    def stats(self) -> Mapping[str, Any]:
        """Counts of the requests in the pool."""
        with self._lock:
            return {"num_jobs": len(self._jobs), "num_bytes": self._num_bytes}

    def _refuse(self, responder: Responder, error: Exception) -> None:
        self._refusals.count(error)
        responder.fail(error)

    def _queue_job(self, request: Any, responder: Responder) -> None:
        parameters = read_parameters(request)
        given = {*(tensor.name() for tensor in request.inputs()), *parameters}
        has_prompt = not given.isdisjoint(PROMPTS)
        is_lookup = _is_lookup(request)
        if not is_lookup:
            if has_prompt and self._markers.is_queue_full():
                raise Overloaded("queue full: every engine has as many requests as it may hold")
            if self._markers.is_recovering():
                raise Recovering("a part of the server died and is being started again")
        inputs = read_inputs(request)
        size = checked_size(request, inputs, self._limits)
        job = _Job(inputs, parameters, request.timeout(), responder, is_lookup)
        at_once = not has_prompt and size <= _AT_ONCE_BYTES
        with self._lock:
            is_full = len(self._jobs) >= self._max_jobs or self._num_bytes + size > self._max_bytes
            if is_full and not at_once:
                raise Overloaded(
                    f"queue full: {len(self._jobs)} requests of {self._num_bytes} bytes wait to be "
                    "tokenized"
                )
            self._jobs.add(job)
            self._num_bytes += size
        if at_once:
            self._run(job, size)
        else:
            self._pool.submit(self._run, job, size)

    def _run(self, job: _Job, size: int) -> None:
        try:
            ids, request, chat_format = self._tokenize(job, self._parse(job))
            told = self._told(ids, chat_format) if job.is_lookup else {}
            with job.sending:
                if job.stopped and isinstance(request, Generation):
                    outputs = _outputs(EMPTY, Stopped(wanted=request.wanted, n=request.n))
                else:
                    outputs = {**_outputs(ids, request), **told}
                job.responder.send(make_response(outputs), final=True)
        except Exception as error:
            self._refuse(job.responder, error)
        finally:
            with self._lock:
                self._jobs.discard(job)
                self._num_bytes -= size

    def _parse(self, job: _Job) -> Generation | StopRequest:
        return parse_generation(
            job.inputs,
            job.parameters,
            arrival_time_ns=job.arrival_time_ns,
            timeout_us=job.timeout_us,
            defaults=self._defaults,
            limits=self._limits,
        )

    def _tokenize(
        self, job: _Job, request: Generation | StopRequest
    ) -> tuple[IntArray, Generation | StopRequest, ChatFormat | None]:
        """int32[num_prompt_tokens], the request as the engine gets it, and what is known of the
        answer to a chat."""
        if isinstance(request, StopRequest):
            self._stop(job)
            return EMPTY, request, None
        if job.stopped:
            return EMPTY, request, None
        prompt = self._encoder.rendered(request.prompt)
        chat_format = prompt.format if isinstance(prompt, RenderedChat) else None
        if job.is_lookup:
            ids = self._encoder.look_up(prompt)  # int32[num_prompt_tokens]
        else:
            ids = self._encoder.encode(prompt, self._markers.most_tokens())
        sampling = self._encoder.after_thinking(request.sampling, prompt)
        if sampling is not request.sampling:
            request = replace(request, sampling=sampling)
        self._encoder.check_token_ids("stop_token_ids", request.sampling.stop_token_ids)
        if request.exclude_input_in_output:
            return ids, request, chat_format
        prompt_text = self._encoder.prompt_text(
            request.prompt, ids, skip_special_tokens=request.skip_special_tokens
        )
        return ids, replace(request, prompt_text=prompt_text), chat_format

    def _told(self, ids: IntArray, chat_format: ChatFormat | None) -> Arrays:
        """What a lookup is told besides the ids, int32[num_tokens]."""
        most_tokens = self._markers.most_tokens() or self._encoder.context
        return {
            TOKEN_STRS.name: texts_array(self._encoder.names(ids)),
            TEXT.name: text_array(self._encoder.text(ids)),
            MAX_SEQUENCE_LENGTH.name: np.array([most_tokens], dtype=np.int32),
            CHAT_FORMAT.name: text_array("null" if chat_format is None else chat_format.to_json()),
        }

    def _stop(self, stop: _Job) -> None:
        label = stop.responder.label
        with self._lock:
            same = [job for job in self._jobs if job is not stop and job.responder.label == label]
        for job in same if label else ():
            with job.sending:
                job.stopped = True


def _is_lookup(request: Any) -> bool:
    """Whether a client asks for outputs that no ensemble takes; one that names no outputs does."""
    wanted = request.requested_output_names()
    return any(tensor.name in wanted for tensor in LOOKUPS)


def _outputs(ids: IntArray, request: Generation | StopRequest | Stopped) -> Arrays:
    """The tensors for the engine."""
    return {INPUT_IDS.name: ids, REQUEST.name: text_array(encode_record(request))}
