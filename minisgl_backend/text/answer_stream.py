"""The detokenizer's side of one stream: packets in, answers out.

Combines the text (``text.detokenizer``) with everything else in the packets, and decides when to
answer: with ``stream`` whenever there is new text, more log-probabilities of the prompt, or the end
of a sample; otherwise once, at the end of all samples. Counts and logprobs without an answer are
kept for the next one. Must not know Triton or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.request import Finished, FinishReason, FloatArray, TokenId, TokenLogprobs
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.acks import Verdict
from minisgl_backend.wire.answer import (
    NO_LOGPROBS,
    Answer,
    SampleAnswer,
    most_likely,
    prompt_logprobs_json,
)
from minisgl_backend.wire.packets import Packet, SampleDelta, StreamStart, Times


class _Sample:
    """One sample: the state of its text, and everything that is still to be answered."""

    def __init__(self, text: TextStream, prompt_text: str | None) -> None:
        self._text = text
        self._unsent = [prompt_text] if prompt_text else []
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative = 0.0
        self._finish: FinishReason | None = None
        self._stop_reason: str | int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the next answer is the last about this sample."""
        return self._finish is not None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended it."""
        return self._text.stop is not None

    def read(self, new: SampleDelta) -> bool:
        """Take new tokens. Returns whether there is something to answer."""
        token_ids, finish = new.token_ids, new.finish
        if not token_ids and finish is None:
            return False
        shown = token_ids[:-1] if _ends_with_stop_token(finish, token_ids) else token_ids
        delta = self._text.push(shown, final=finish is not None)
        if delta.text:
            self._unsent.append(delta.text)
        num_tokens = delta.num_tokens if delta.stop is not None else len(token_ids)
        self._token_ids += token_ids[:num_tokens]
        if new.logprobs:
            kept = new.logprobs[:num_tokens]
            self._logprobs += kept
            self._cumulative += sum(one.logprob for one in kept)
        if self._text.stop is not None:
            self._finish, self._stop_reason = FinishReason.STOP, self._text.stop
        elif finish is not None:
            self._finish, self._stop_reason = finish.reason, finish.stop_token_id
        return bool(delta.text) or self.is_over

    def answer(self) -> SampleAnswer:
        """Everything that was not yet in an answer."""
        answer = SampleAnswer(
            text="".join(self._unsent),
            token_ids=self._token_ids,
            finish=self._finish,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs,
            cumulative_logprob=self._cumulative,
        )
        self._unsent, self._token_ids, self._logprobs = [], [], []
        return answer


class AnswerStream:
    """One stream; ``push`` its packets in order, the first with index 0 included."""

    def __init__(self, vocabulary: Vocabulary, start: StreamStart) -> None:
        self.start = start
        self.over: Verdict | None = None
        """Set once the client has everything; later packets get no answer."""
        self.stopped = 0
        """A bit for each sample that a stop string ended: see ``Ack``."""
        self._vocabulary = vocabulary
        self._prompt_logprobs = [NO_LOGPROBS]  # as JSON: see ``prompt_logprobs_json``
        text = TextStream(
            vocabulary,
            stop_strings=start.stop_strings,
            min_tokens=start.min_tokens,
            silent_ids=start.stop_token_ids,
            continues=start.prompt_text is not None,
            skip_special_tokens=start.skip_special_tokens,
        )
        self._samples = [_Sample(text.fork(), start.prompt_text) for _ in range(start.num_samples)]
        self._num_cached = 0
        self._times: Times | None = None
        self._embedding: FloatArray | None = None

    def push(self, packet: Packet) -> Answer | None:
        """The answer to send after this packet, if any. The packet must not have an error."""
        assert self.over is None and packet.error is None
        if packet.num_cached_tokens is not None:
            self._num_cached = packet.num_cached_tokens
        if packet.times is not None:
            self._times = packet.times
        self._embedding = packet.embedding
        has_more = False
        if (scored := packet.prompt_logprobs) is not None:
            bytes_of = self._vocabulary.token_bytes
            self._prompt_logprobs.append(prompt_logprobs_json(scored, bytes_of))
            has_more = True
        for delta in packet.deltas:
            if delta.sample >= len(self._samples):  # a client made up the packet
                raise InvalidRequest(f"the stream has no sample {delta.sample}")
            sample = self._samples[delta.sample]
            if not sample.is_over:  # it is if a stop string ended it, and the engine does not know
                has_more |= sample.read(delta)
                self.stopped |= sample.is_stopped << delta.sample
        if packet.is_last or all(sample.is_over for sample in self._samples):
            self.over = Verdict.STOP
            return self._answer()
        return self._answer() if has_more and self.start.stream else None

    def _answer(self) -> Answer:
        answer = Answer(
            samples=most_likely([sample.answer() for sample in self._samples], self.start.n),
            num_input_tokens=self.start.num_input_tokens,
            num_cached_tokens=self._num_cached,
            times=self._times,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )
        self._prompt_logprobs = []
        return answer


def _ends_with_stop_token(finish: Finished | None, token_ids: Sequence[TokenId]) -> bool:
    """Whether the last token is the one that ended the request, which has no text."""
    return (
        finish is not None
        and finish.stop_token_id is not None
        and len(token_ids) > 0
        and token_ids[-1] == finish.stop_token_id
    )
