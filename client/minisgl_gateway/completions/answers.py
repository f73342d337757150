"""Results of the engine -> whole answers as OpenAI's clients read them, and what streams share with
them.

Must not know how the engine is asked, or how an answer is sent.
"""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from minisgl_client.answer import Delta, Result, TokenLogprob, TokenLogprobs

from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.completions import answer_schema as schema
from minisgl_gateway.counts import Counts
from minisgl_gateway.logprobs import token_logprobs
from minisgl_gateway.parts import Piece

_UTF8: Final = codecs.getincrementaldecoder("utf-8")

CallForm: TypeAlias = Literal["tool_calls", "function_call"]
"""The field of a message that has calls: those of tools, or the one call of the older form."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What a whole answer, and each chunk of a stream, begins with."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, kind: str, model: str) -> Heading:
        """A heading with an id of its own; ``kind`` is ``chatcmpl`` or ``cmpl``."""
        return cls(f"{kind}-{uuid.uuid4().hex}", model)


@dataclass(frozen=True, slots=True)
class Echo:
    """What comes before an answer: the prompt's ``text``. ``first_token`` is the text of its first
    token, which comes with no log-probability."""

    text: str = ""
    first_token: str = ""

    @property
    def first_utf8(self) -> bytes:
        """What the first token adds to the text: nothing if it comes before the text, like a token
        that begins every prompt. If it is part of a character, only the first byte is known."""
        whole, part, _ = self.first_token.partition("\ufffd")
        if not self.text.startswith(whole):
            return b""
        known = whole.encode()
        return known + self.text[len(whole) :].encode()[:1] if part else known


def chat_answer(
    heading: Heading,
    pieces: Sequence[Piece],
    counts: Counts,
    *,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    prompt_ids: Sequence[int] | None,
    call_form: CallForm,
    tells_thoughts: bool,
) -> schema.ChatCompletion:
    """The answer to a chat, with its choices in order; with ``prompt_ids`` it tells tokens."""
    choices = []
    for index, piece in enumerate(pieces):
        calls = [called(one) for one in piece.calls]
        is_older = bool(calls) and call_form == "function_call"
        message = schema.AnswerMessage(
            content=piece.text if piece.text or not calls else None,
            reasoning_content=(piece.thoughts or None) if tells_thoughts else None,
            tool_calls=None if is_older else calls or None,
            function_call=calls[0].function if is_older else None,
        )
        logprobs = None
        if num_logprobs is not None:
            logprobs = chat_logprobs(piece.source.logprobs, num_logprobs)
        choices.append(
            schema.ChatChoice(
                index=index,
                message=message,
                logprobs=logprobs,
                finish_reason=chat_finish(piece, call_form),
                token_ids=None if prompt_ids is None else token_ids(piece.source),
            )
        )
    return schema.ChatCompletion(
        id=heading.id,
        created=heading.created,
        model=heading.model,
        choices=choices,
        usage=usage_of(counts),
        prompt_logprobs=prompt_logprobs(pieces[0].source, num_prompt_logprobs),
        prompt_token_ids=None if prompt_ids is None else list(prompt_ids),
    )


def completion_answer(
    heading: Heading,
    pieces: Sequence[Piece],
    counts: Counts,
    *,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    echoes: Sequence[Echo | None],
    prompt_ids: Sequence[Sequence[int] | None],
) -> schema.Completion:
    """The answer to a completion, with its choices in order, each after its echo, if any; it tells
    the tokens of those that have ``prompt_ids``."""
    choices = []
    for index, (piece, echo, ids) in enumerate(zip(pieces, echoes, prompt_ids, strict=True)):
        result = piece.source
        logprobs = None
        if num_logprobs is not None:
            echoed = () if echo is None else result.prompt_logprobs
            logprobs = completion_logprobs(
                (*echoed, *result.logprobs), num_logprobs, TextOffsets(), echo
            )
        choices.append(
            schema.CompletionChoice(
                index=index,
                text=result.text if echo is None else echo.text + result.text,
                logprobs=logprobs,
                finish_reason=finish(piece),
                prompt_logprobs=prompt_logprobs(result, num_prompt_logprobs),
                prompt_token_ids=None if ids is None else list(ids),
                token_ids=None if ids is None else token_ids(result),
            )
        )
    return schema.Completion(
        id=heading.id,
        created=heading.created,
        model=heading.model,
        choices=choices,
        usage=usage_of(counts),
    )


def usage_of(counts: Counts) -> schema.Usage:
    return schema.Usage(
        prompt_tokens=counts.num_input_tokens,
        completion_tokens=counts.num_output_tokens,
        total_tokens=counts.num_input_tokens + counts.num_output_tokens,
        prompt_tokens_details=schema.PromptTokensDetails(cached_tokens=counts.num_cached_tokens),
        completion_tokens_details=schema.CompletionTokensDetails(
            reasoning_tokens=counts.num_thought_tokens
        ),
    )


def called(piece: CalledTool) -> schema.ToolCall:
    return schema.ToolCall(
        id=f"call_{uuid.uuid4().hex[:24]}",
        function=schema.CalledFunction(name=piece.name, arguments=piece.arguments),
    )


def finish(piece: Piece) -> Literal["stop", "length"]:
    """The finish reason of the last piece."""
    assert piece.ending is not None
    return piece.ending.reason


def chat_finish(piece: Piece, call_form: CallForm) -> Literal["stop", "length"] | CallForm:
    """The same for a chat; an answer that ended with a call says so."""
    reason = finish(piece)
    return call_form if reason == "stop" and piece.num_calls else reason


# --- logprobs, in the two forms of OpenAI's API --------------------------------------------------


def chat_logprobs(tokens: Sequence[TokenLogprobs], num_top: int) -> schema.ChatLogprobs:
    """One element per token, with the ``num_top`` likeliest at its position."""
    return schema.ChatLogprobs(content=token_logprobs(tokens, num_top))


class TextOffsets:
    """Where the tokens of a text begin, in characters. A token that begins inside a character
    begins where that one does."""

    def __init__(self) -> None:
        self._decoder = _UTF8("replace")
        self._num_characters = 0

    def add(self, token: bytes) -> int:
        """The offset of the next token."""
        if token and token[0] & 0xC0 != 0x80:  # not a continuation of the character before
            self._decode(b"", final=True)
        begin = self._num_characters
        self._decode(token)
        return begin

    def _decode(self, token: bytes, *, final: bool = False) -> None:
        self._num_characters += len(self._decoder.decode(token, final))


def completion_logprobs(
    tokens: Sequence[TokenLogprobs | None],
    num_top: int,
    offsets: TextOffsets,
    echo: Echo | None,
) -> schema.CompletionLogprobs:
    """One element per token in each list; ``offsets`` knows the tokens before.

    The chosen token is listed along with the ``num_top`` likeliest, as OpenAI does. None is the
    first token of an echoed prompt, which ``echo`` knows.
    """
    texts, begins = [], []
    for token in tokens:
        if token is None:
            assert echo is not None
            text, utf8 = echo.first_token, echo.first_utf8
        else:
            text, utf8 = token.chosen.text, token.chosen.utf8 or token.chosen.text.encode()
        texts.append(text)
        begins.append(offsets.add(utf8))
    return schema.CompletionLogprobs(
        tokens=texts,
        token_logprobs=[None if token is None else token.chosen.logprob for token in tokens],
        top_logprobs=[
            None if token is None else _likeliest_by_text(token.chosen, *token.top(num_top))
            for token in tokens
        ],
        text_offset=begins,
    )


def _likeliest_by_text(*tokens: TokenLogprob) -> dict[str, float]:
    """The log-probabilities by text. All parts of characters have the text U+FFFD: the likeliest
    such token stands for all, so that the largest value is that of the likeliest token."""
    found: dict[str, float] = {}
    for token in tokens:
        found[token.text] = max(token.logprob, found.get(token.text, token.logprob))
    return found


def token_ids(source: Delta | Result) -> list[int]:
    """The tokens of an answer, or of a part of it, that has logprobs."""
    return [one.chosen.token_id for one in source.logprobs]


def prompt_logprobs(result: Delta | Result, num_top: int | None) -> schema.PromptLogprobs | None:
    """The prompt's logprobs in vLLM's form; None if they were not asked for."""
    if num_top is None:
        return None
    return [
        None
        if token is None
        else {
            one.token_id: schema.PromptLogprob(
                logprob=one.logprob, rank=one.rank, decoded_token=one.text
            )
            for one in (token.chosen, *token.top(num_top))
        }
        for token in result.prompt_logprobs
    ]
