"""The detokenizer's side of one stream: chunks in, answers out.

Joins ``text.TextStream`` with what the chunks carry beside token ids, and decides when there is
something to say: with ``stream`` whenever there is new text, else once, at the end. Counts and
logprobs of what an answer does not tell are kept for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

from minisgl_backend.request import Finished, FinishReason, TokenId, TokenLogprobs
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.tritonserver.wire.answer import Answer
from minisgl_backend.tritonserver.wire.chunk import Chunk, StreamStart, Times


class AnswerStream:
    """One stream; ``push`` its chunks in order, the first with index 0 included."""

    __slots__ = (
        "_cumulative",
        "_logprobs",
        "_num_cached",
        "_num_untold",
        "_text",
        "_times",
        "_token_ids",
        "_untold",
        "done",
        "start",
    )

    def __init__(self, vocabulary: Vocabulary, start: StreamStart) -> None:
        self.start = start
        self.done = False
        """Whether its last answer was made; later chunks are not for the client."""
        self._text = TextStream(
            vocabulary,
            stop_strings=start.stop_strings,
            min_tokens=start.min_tokens,
            silent_ids=start.stop_token_ids,
            continues=start.prompt_text is not None,
        )
        self._untold = [start.prompt_text] if start.prompt_text else []
        self._num_untold = 0
        self._num_cached = 0
        self._token_ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._cumulative = 0.0
        self._times: Times | None = None

    def push(self, chunk: Chunk) -> Answer | None:
        """The answer that a chunk gives rise to, if any. Chunks with an error do not come here."""
        assert not self.done
        finish = chunk.finish
        if chunk.num_cached_tokens is not None:
            self._num_cached = chunk.num_cached_tokens
        if chunk.times is not None:
            self._times = chunk.times
        text = self._read(chunk)
        if self._text.stop is not None:
            self.done = True
            return self._answer(text, FinishReason.STOP, self._text.stop)
        if finish is not None:
            self.done = True
            return self._answer(text, finish.reason, finish.stop_token_id)
        if text and self.start.stream:
            return self._answer(text, None, None)
        if text:
            self._untold.append(text)
        return None

    def _read(self, chunk: Chunk) -> str:
        """Take a chunk's tokens in; returns the text that they release."""
        token_ids = chunk.token_ids
        if not token_ids and chunk.finish is None:
            return ""
        shown = token_ids[:-1] if _ends_with_stop_token(chunk.finish, token_ids) else token_ids
        delta = self._text.push(shown, final=chunk.finish is not None)
        num_tokens = delta.num_tokens if delta.stop is not None else len(token_ids)
        self._num_untold += num_tokens
        if chunk.logprobs:
            told = chunk.logprobs[:num_tokens]
            self._token_ids += token_ids[: len(told)]
            self._logprobs += told
            self._cumulative += sum(one.logprob for one in told)
        return delta.text

    def _answer(
        self, text: str, finish: FinishReason | None, stop_reason: str | int | None
    ) -> Answer:
        if self._untold:
            text = "".join((*self._untold, text))
            self._untold = []
        answer = Answer(
            text=text,
            token_ids=self._token_ids,
            finish=finish,
            stop_reason=stop_reason,
            num_input_tokens=self.start.num_input_tokens,
            num_output_tokens=self._num_untold,
            num_cached_tokens=self._num_cached,
            logprobs=self._logprobs,
            cumulative_logprob=self._cumulative,
            times=self._times,
        )
        self._num_untold = 0
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
