"""A parsed request: a ``Generation`` of a prompt, or a ``StopRequest`` that ends others.

A ``Generation`` that is ended before it reaches the engine becomes a ``Stopped``. Must not know how
clients spell any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias

from minisgl_backend.request import IntArray, SamplingParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text as it is. What looks like a special token becomes one only with
    ``parse_special_tokens``; ``add_special_tokens`` adds those that the tokenizer puts around each
    text.
    """

    text: str
    parse_special_tokens: bool = False
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class MessagesPrompt:
    """A chat: a list of messages and optionally a list of tools and an object of variables for the
    template, all as JSON texts.

    With ``add_generation_prompt`` the text ends with the beginning of an answer.
    """

    messages: str
    tools: str | None = None
    variables: str | None = None
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrompt:
    """Token ids, int32[num_prompt_tokens]."""

    ids: IntArray


Prompt: TypeAlias = TextPrompt | MessagesPrompt | TokenPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which outputs a request asks for besides its text or tokens."""

    finish_reason: bool = False
    stop_reason: bool = False
    cumulative_logprob: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    perf_metrics: bool = False
    log_probs: bool = False
    """``cum_log_probs`` and ``output_log_probs``."""
    logprobs: bool = False
    null_logprobs: bool = False
    """``logprobs`` without a number of alternatives: the output is null."""
    prompt_logprobs: bool = False
    embedding: bool = False

    def names(self) -> list[str]:
        """The names of the fields that are true."""
        return [spec.name for spec in fields(self) if getattr(self, spec.name)]

    def flags(self) -> list[str]:
        """The flags among a request's inputs that ask for these outputs. ``prompt_logprobs`` and
        ``embedding`` have none: ``num_prompt_logprobs`` and ``embed`` ask for them."""
        names = [name for name in self.names() if name not in ("prompt_logprobs", "embedding")]
        return [f"return_{name.removeprefix('null_')}" for name in names]


NOTHING: Final = Wanted()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """One prompt to be continued, and how to answer.

    In the engine ``prompt`` is a ``TokenPrompt``. ``arrival_time_ns`` is a reading of
    ``time.time_ns`` in the model that Triton called first; ``timeout_ms`` counts from it. If
    ``seed`` is None, ``sampling.seed`` is meaningless, and the engine draws one. With
    ``fit_max_tokens``, ``sampling.max_tokens`` is lowered to the room that there is.
    ``min_chunk_interval_ms`` None means the engine's option. The tokenizer sets ``prompt_text`` if
    the answer starts with the prompt. ``best_of`` samples are generated, and the answer is the
    ``n`` most likely of them.
    """

    prompt: Prompt
    arrival_time_ns: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    fit_max_tokens: bool = False
    seed: int | None = None
    stop_strings: tuple[str, ...] = ()
    stream: bool = False
    exclude_input_in_output: bool = True
    skip_special_tokens: bool = True
    priority: int = 0
    timeout_ms: int | None = None
    cache_salt: str = ""
    lora_name: str | None = None
    lora_task_id: int | None = None
    min_chunk_interval_ms: int | None = None
    wanted: Wanted = NOTHING
    prompt_text: str | None = None
    n: int = 1
    best_of: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """Cancel all live requests that have the same id as the request that asks for it."""

    wanted: Wanted = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOrder:
    """Load an adapter (its name and path), unload one by its name, or neither; then list all."""

    load: tuple[str, str] | None = None
    unload: str | None = None

    @property
    def only_lists(self) -> bool:
        """Whether nothing is loaded or unloaded."""
        return self.load is None and self.unload is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A request that a ``StopRequest`` ended before it reached the engine. The engine answers it
    with ``n`` empty samples."""

    wanted: Wanted = NOTHING
    n: int = 1
