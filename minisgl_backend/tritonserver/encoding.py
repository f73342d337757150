"""What a stream gives out -> a Triton response, for the detokenizer or for a client.

Knows the wire's chunks and answers. One object a stream, used by one sender at a time.
"""

from __future__ import annotations

from typing import Any

from minisgl_backend.request import Failed, Finished
from minisgl_backend.tritonserver.responder import error_response
from minisgl_backend.tritonserver.stream import Outgoing
from minisgl_backend.tritonserver.tensors import bytes_array, make_response
from minisgl_backend.tritonserver.wire.answer import Answer, answer_arrays
from minisgl_backend.tritonserver.wire.chunk import Chunk, StreamStart, encode_chunk
from minisgl_backend.tritonserver.wire.generation import Wanted
from minisgl_backend.tritonserver.wire.parameters import CHUNK


class ChunkEncoder:
    """Responses for the detokenizer: chunks."""

    def __init__(self, *, reply_to: str, key: int, start: StreamStart) -> None:
        self._reply_to = reply_to
        self._key = key
        self._start = start

    def __call__(self, outgoing: Outgoing) -> Any:
        terminal = outgoing.terminal
        error = terminal.error if isinstance(terminal, Failed) else None
        chunk = Chunk(
            reply_to=self._reply_to,
            key=self._key,
            index=outgoing.index,
            token_ids=outgoing.token_ids,
            start=self._start if outgoing.index == 0 else None,
            num_cached_tokens=outgoing.num_cached_tokens,
            logprobs=outgoing.logprobs,
            finish=terminal if isinstance(terminal, Finished) else None,
            error=None if error is None else (error.code, str(error)),
            times=outgoing.times if self._start.wanted.perf_metrics else None,
        )
        return make_response({CHUNK.name: bytes_array(encode_chunk(chunk))})


class TokenEncoder:
    """Responses for a client of the engine alone, which gets token ids."""

    def __init__(self, *, label: str, num_input_tokens: int, wanted: Wanted) -> None:
        self._label = label
        self._num_input_tokens = num_input_tokens
        self._num_cached_tokens = 0
        self._cumulative_logprob = 0.0
        self._wanted = wanted

    def __call__(self, outgoing: Outgoing) -> Any:
        terminal = outgoing.terminal
        if isinstance(terminal, Failed):
            return error_response(terminal.error, self._label)
        if outgoing.num_cached_tokens is not None:
            self._num_cached_tokens = outgoing.num_cached_tokens
        self._cumulative_logprob += sum(one.logprob for one in outgoing.logprobs)
        answer = Answer(
            token_ids=outgoing.token_ids,
            finish=terminal.reason if terminal is not None else None,
            stop_reason=terminal.stop_token_id if terminal is not None else None,
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=len(outgoing.token_ids),
            num_cached_tokens=self._num_cached_tokens,
            logprobs=outgoing.logprobs,
            cumulative_logprob=self._cumulative_logprob,
            times=outgoing.times,
        )
        return make_response(answer_arrays(answer, self._wanted))
