"""What comes back: ``Delta`` after ``Delta``, and the ``Result`` that they add up to.

Plain values; knows nothing of protocols. What was not asked for is None, or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

ToolDialect: TypeAlias = Literal[
    "hermes",
    "qwen_xml",
    "glm",
    "minimax",
    "seed",
    "gemma4",
    "llama3_json",
    "mistral",
    "nemotron",
    "lfm2",
    "command",
    "harmony",
]
"""How models write tool calls."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was, or might have been, chosen at a position; ``rank`` 1 is the likeliest.

    In ``text``, part of a character is U+FFFD. ``utf8`` is exactly what the token adds to the text;
    None if the server does not say.
    """

    token_id: int
    text: str
    logprob: float
    rank: int
    utf8: bytes | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the token that is there, and the other likely ones by rank."""

    chosen: TokenLogprob
    alternatives: tuple[TokenLogprob, ...] = ()

    def top(self, n: int) -> tuple[TokenLogprob, ...]:
        """The ``n`` likeliest of these tokens, including the chosen one if it is among them."""
        return tuple(sorted((self.chosen, *self.alternatives), key=lambda one: one.rank)[:n])


@dataclass(frozen=True, slots=True)
class Times:
    """The server's clock for one request, ns since 1970."""

    arrival_ns: int
    first_scheduled_ns: int
    first_token_ns: int
    last_token_ns: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the previous delta.

    ``num_output_tokens`` and both kinds of logprobs are those of this delta, and add up to the
    total; the other counts, ``cumulative_logprob`` and ``times`` are about the request so far.
    """

    text: str = ""
    """Whole characters."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``cancelled`` or ``timeout`` in the last delta; None before that."""
    stop_reason: str | int | None = None
    """The stop string or token id that matched."""
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Tokens of the prompt that came from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of this delta."""
    cumulative_logprob: float | None = None
    times: Times | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """The next tokens of the prompt, all before the first text; None for the very first token."""
    embedding: tuple[float, ...] = ()
    """The prompt's embedding, in the last delta: a vector of length 1."""
    sample: int = 0
    """Which of the ``n`` samples it continues. Each has its own deltas, which are interleaved."""


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer. ``finish_reason`` is None if a stream broke off, or if it was not asked for.

    It is the first of ``n`` samples; ``samples`` has all of them.
    """

    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    num_cached_tokens: int | None
    logprobs: tuple[TokenLogprobs, ...]
    cumulative_logprob: float | None
    times: Times | None
    request_id: str
    first_delta_s: float | None
    """Seconds from the call to the first delta, by this machine's clock."""
    total_s: float
    """Seconds from the call to the end."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each token of the prompt; None for the first."""
    embedding: tuple[float, ...] = ()
    """The prompt's embedding, if ``embed`` asked for it: a vector of length 1."""
    others: tuple[Result, ...] = ()
    """The samples after the first."""

    @property
    def samples(self) -> tuple[Result, ...]:
        """All samples; with ``best_of`` the most likely is the first."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What the model's chat template reveals about the answer to a chat."""

    tool_dialect: ToolDialect | None
    """How the template writes tool calls; None if it has no tools, or an unknown dialect."""
    tool_marks: frozenset[str]
    """The marks of the dialect that it writes: a Mistral template that has ``[ARGS]`` among them
    writes ``name[ARGS]{...}``, the others a JSON list."""
    thinking: tuple[str, str] | None
    """The marks around a section of thoughts at the start of the answer; None if there is none."""
    begins_thinking: bool
    """The prompt has begun that section; else the answer has one if it begins with the first mark.
    """
    variables: frozenset[str]
    """The variables that the template reads: ``messages``, ``tools``, ``enable_thinking``, ..."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as tokens."""

    ids: tuple[int, ...]
    strs: tuple[str, ...]
    """The tokens as the vocabulary spells them."""
    text: str
    """Their text, special tokens spelled out."""
    max_sequence_length: int
    """The most tokens of a prompt and its answer."""
    chat_format: ChatFormat | None
    """That of the answer to ``messages``; None for other prompts."""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter that requests may name, and its folder on the server's machine."""

    name: str
    path: str


def add_up(
    deltas: Sequence[Delta],
    *,
    request_id: str,
    first_delta_s: float | None,
    total_s: float,
    num_samples: int = 1,
) -> Result:
    """The result of all deltas of an answer, in order."""
    if num_samples > 1:
        first, *others = (
            add_up(
                [delta for delta in deltas if delta.sample == sample],
                request_id=request_id,
                first_delta_s=first_delta_s,
                total_s=total_s,
            )
            for sample in range(num_samples)
        )
        return replace(first, others=tuple(others))
    last = deltas[-1] if deltas else Delta()
    counts = [delta.num_output_tokens for delta in deltas if delta.num_output_tokens is not None]
    return Result(
        text="".join([delta.text for delta in deltas]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_input_tokens=last.num_input_tokens,
        num_output_tokens=sum(counts) if counts else None,
        num_cached_tokens=last.num_cached_tokens,
        logprobs=tuple(one for delta in deltas for one in delta.logprobs),
        cumulative_logprob=last.cumulative_logprob,
        times=last.times,
        request_id=request_id,
        first_delta_s=first_delta_s,
        total_s=total_s,
        prompt_logprobs=tuple(one for delta in deltas for one in delta.prompt_logprobs),
        embedding=last.embedding,
    )
