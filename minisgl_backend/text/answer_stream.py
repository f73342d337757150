"""The detokenizer's side of one stream: packets in, answers out.

Joins ``text.detokenizer`` with what the packets carry beside token ids, and decides when there is
something to say: with ``stream`` whenever there is new text, or more log-probabilities of the
prompt, else once, at the end. Counts and logprobs that an answer leaves out are kept for the next
one. Must not know Triton or sockets.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    FloatArray,
    TokenId,
    TokenLogprobs,
)
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.answer import NO_LOGPROBS, Answer, prompt_logprobs_json
from minisgl_backend.wire.packets import Packet, StreamStart, Times, Verdict


class AnswerStream:
    """One stream; ``push`` its packets in order, the first with index 0 included."""

    __slots__ = (
        "_cumulative",
        "_embedding",
        "_logprobs",
        "_num_cached",
        "_num_unsent",
        "_prompt_logprobs",
        "_text",
        "_times",
        "_token_ids",
        "_unsent",
        "_vocabulary",
        "heard_s",
        "next_poll_s",
        "over",
        "start",
    )

    def __init__(self, vocabulary: Vocabulary, start: StreamStart) -> None:
        self.start = start
        self.over: Verdict | None = None
        """Set once nothing more is for the client; later packets are answered with nothing."""
        self.heard_s = 0.0
        """When the last packet came, of ``time.monotonic``, as is the next."""
        self.next_poll_s = 0.0
        """When to ask Triton again if the client has cancelled."""
        self._vocabulary = vocabulary
        self._prompt_logprobs = [NO_LOGPROBS]  # as JSON: see ``prompt_logprobs_json``
        self._text = TextStream(
            vocabulary,
            stop_strings=start.stop_strings,
            min_tokens=start.min_tokens,
            silent_ids=start.stop_token_ids,
            continues=start.prompt_text is not None,
            skip_special_tokens=start.skip_special_tokens,
        )
        self._unsent = [start.prompt_text] if start.prompt_text else []
        self._num_unsent = 0
        self._num_cached = 0
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative = 0.0
        self._times: Times | None = None
        self._embedding: FloatArray | None = None

    def push(self, packet: Packet) -> Answer | None:
        """The answer that a packet gives rise to, if any. One with an error does not come here."""
        assert self.over is None
        finish = packet.terminal
        assert not isinstance(finish, Failed)
        if packet.num_cached_tokens is not None:
            self._num_cached = packet.num_cached_tokens
        if packet.times is not None:
            self._times = packet.times
        self._embedding = packet.embedding
        if (scored := packet.prompt_logprobs) is not None:
            text_of = self._vocabulary.token_text
            self._prompt_logprobs.append(prompt_logprobs_json(scored, text_of))
        text = self._read(packet, finish)
        if self._text.stop is not None:
            self.over = Verdict.STOP
            return self._answer(text, FinishReason.STOP, self._text.stop)
        if finish is not None:
            self.over = Verdict.STOP
            return self._answer(text, finish.reason, finish.stop_token_id)
        if (text or scored is not None) and self.start.stream:
            return self._answer(text, None, None)
        if text:
            self._unsent.append(text)
        return None

    def _read(self, packet: Packet, finish: Finished | None) -> str:
        """Take a packet's tokens in; returns the text that they release."""
        token_ids = packet.token_ids
        if not token_ids and finish is None:
            return ""
        shown = token_ids[:-1] if _ends_with_stop_token(finish, token_ids) else token_ids
        delta = self._text.push(shown, final=finish is not None)
        num_tokens = delta.num_tokens if delta.stop is not None else len(token_ids)
        self._num_unsent += num_tokens
        if packet.logprobs:
            kept = packet.logprobs[:num_tokens]
            self._token_ids += token_ids[: len(kept)]
            self._logprobs += kept
            self._cumulative += sum(one.logprob for one in kept)
        return delta.text

    def _answer(
        self, text: str, finish: FinishReason | None, stop_reason: str | int | None
    ) -> Answer:
        if self._unsent:
            text = "".join((*self._unsent, text))
            self._unsent = []
        answer = Answer(
            text=text,
            token_ids=self._token_ids,
            finish=finish,
            stop_reason=stop_reason,
            num_input_tokens=self.start.num_input_tokens,
            num_output_tokens=self._num_unsent,
            num_cached_tokens=self._num_cached,
            logprobs=self._logprobs,
            cumulative_logprob=self._cumulative,
            times=self._times,
            prompt_logprobs=self._prompt_logprobs,
            embedding=self._embedding,
        )
        self._num_unsent = 0
        self._prompt_logprobs = []
        if self._logprobs:
            self._token_ids, self._logprobs = [], []
        return answer


def _ends_with_stop_token(finish: Finished | None, token_ids: Sequence[TokenId]) -> bool:
    """Whether the last token is the one that ended the request, which has no text."""
    return (
        finish is not None
        and finish.stop_token_id is not None
        and len(token_ids) > 0
        and token_ids[-1] == finish.stop_token_id
    )
