"""What a request is and what can happen to it: the vocabulary that all layers share.

Knows token ids and validated sampling parameters. Must not know text, Triton, pages or tensors.
Everything here is immutable.

A request's events arrive in this order: at most one ``Admitted``, any number of ``PromptLogprobs``,
any number of ``Generated`` or one ``Embedded``, then exactly one terminal event, ``Finished`` or
``Failed``. Common tokens of a ``BufferedSink`` go to its buffer instead of being ``Generated``
(``token_buffer``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import MiniSGLError

RequestId = NewType("RequestId", int)
"""The engine's own number for a request, never reused; the client's id is only a label."""

TokenId: TypeAlias = int
IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
Mask: TypeAlias = npt.NDArray[np.bool_]
EMPTY: Final = np.empty(0, dtype=np.int32)
"""No tokens, rows or pages."""
EMPTY.flags.writeable = False

MAX_SAMPLES: Final = 64
"""The most answers that a prompt can have."""

LEAST_TEMPERATURE: Final = 1e-5
"""Below this temperature sampling is greedy: 1 / temperature might overflow float32."""


class FinishReason(str, Enum):
    """Why a request ended without an error; the values are those of the wire."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


class GrammarKind(str, Enum):
    """The language in which a ``Grammar`` is written."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a request's output must have; ``grammar.sources`` documents ``source``.

    If ``begins_after`` is set, the output is free up to and including that token, which ends the
    model's thoughts. If ``opened_by`` is set too, there are thoughts only if the output begins with
    that token. With ``channels`` the output consists of messages in channels, and only the last one
    has the form (``grammar.channels``).
    """

    kind: GrammarKind
    source: str
    begins_after: TokenId | None = None
    opened_by: TokenId | None = None
    channels: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token of a request is chosen, and when the request ends.

    If ``is_greedy``, ``temperature`` must not be used. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0
    mean off. The random numbers depend only on ``seed`` and the token's position, not on the rest
    of the batch. Any of the ``stop_token_ids`` ends the request; none of them is sampled before
    there are ``min_tokens`` tokens. With a ``grammar`` only tokens that it allows are sampled, and
    the request ends where the grammar does.

    ``num_logprobs`` is None for no logprobs, 0 for those of the chosen tokens alone, and otherwise
    the number of alternatives returned with each. ``num_prompt_logprobs`` is the same for the
    prompt's tokens; with it ``max_tokens`` may be 0, and then the prompt is only scored. With
    ``embed`` the prompt's embedding is returned; ``max_tokens`` is 0.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    embed: bool = False
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen, without a division by the temperature."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the tokens seen so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class AdapterFacts(NamedTuple):
    """What an adapter's files say about it: ``rank`` is the largest rank among its projections;
    ``targets`` has a bit for each kind of projection that it adds to; ``files`` is a number that
    changes when its files do; ``num_bytes`` is its size as it is copied to a device; ``base`` is
    the model that it was trained for, in the words of its files, empty if they do not say."""

    rank: int
    targets: int
    files: int = 0
    num_bytes: int = 0
    base: str = ""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that requests may name.

    ``id`` is the engine's own number, from 1 and never reused: an adapter that is loaded again
    under the same name gets a new one.
    """

    id: int
    name: str
    path: str
    facts: AdapterFacts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One prompt to be continued.

    ``prompt`` is int32[num_prompt_tokens] and has at least one token. A request of higher
    ``priority`` is served first. ``deadline_s`` is the reading of ``time.monotonic`` at which the
    request ends; the planner ignores it. Only requests with the same ``cache_salt`` and
    the same ``adapter`` share cached prefixes. ``label`` is the client's own id, logged next to the
    engine's.

    A request with a ``leader`` is a further sample of that request's prompt (``samples_of``): it
    begins once the prompt of its leader is computed, or the leader has ended.
    """

    id: RequestId
    prompt: IntArray
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    adapter: Adapter | None = None
    label: str = ""
    leader: RequestId | None = None

    @property
    def cache_key(self) -> str:
        """Equal for requests that may share cached prefixes. Unambiguous: no salt has a space."""
        return self.cache_salt if self.adapter is None else f"{self.cache_salt} {self.adapter.id}"


def samples_of(request: Request, ids: Sequence[RequestId]) -> list[Request]:
    """One request for each of several answers to a prompt; ``ids`` begins with ``request.id``.

    The seed of sample i is the request's seed + i, modulo 2**64, so a separate request with that
    seed gets the same tokens. Only the first sample, the leader of the others, scores the prompt.
    """
    if len(ids) == 1:
        return [request]
    sampling = replace(request.sampling, num_prompt_logprobs=None)
    others = [
        replace(
            request,
            id=request_id,
            sampling=replace(sampling, seed=(sampling.seed + index) % 2**64),
            leader=request.id,
        )
        for index, request_id in enumerate(ids[1:], 1)
    ]
    return [request, *others]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of one token under the model's raw logits.

    ``rank`` is 1 for the most likely token. ``alternatives`` holds pairs of token id and logprob,
    the most likely first.
    """

    logprob: float
    rank: int
    alternatives: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """Log-probabilities of n successive prompt tokens, each given all tokens before it.

    They come from the model's raw logits. The first token of a prompt has none; the others come in
    order, each once, even if the request is retracted. [n]: ``token_ids`` int32, ``logprobs``
    float32 and ``ranks`` int32, 1 for the most likely token. [n, num_alternatives], the most likely
    first: ``alternative_ids`` int32 and their log-probabilities ``alternatives`` float32.
    """

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray
    alternative_ids: IntArray
    alternatives: FloatArray

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, begin: int, end: int) -> PromptLogprobs:
        """The log-probabilities of the tokens from ``begin`` up to ``end``; arrays are views."""
        return PromptLogprobs(
            self.token_ids[begin:end],
            self.logprobs[begin:end],
            self.ranks[begin:end],
            self.alternative_ids[begin:end],
            self.alternatives[begin:end],
        )

    @classmethod
    def joined(cls, parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
        """The parts as one. There is at least one, and all have the same number of alternatives."""
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.alternative_ids for part in parts]),
            np.concatenate([part.alternatives for part in parts]),
        )

    def to_bytes(self) -> bytes:
        """The arrays, one after another in the order of the fields, as little-endian numbers of
        four bytes."""
        arrays = (
            self.token_ids.astype("<i4"),
            self.logprobs.astype("<f4"),
            self.ranks.astype("<i4"),
            self.alternative_ids.astype("<i4"),
            self.alternatives.astype("<f4"),
        )
        return b"".join([array.tobytes() for array in arrays])

    @classmethod
    def from_bytes(cls, raw: bytes, num_alternatives: int) -> PromptLogprobs:
        """What ``to_bytes`` was called on. Raises ``ValueError`` for any other bytes."""
        words = np.frombuffer(raw, "<i4")  # raises if a number is incomplete
        num_tokens, rest = divmod(len(words), 3 + 2 * num_alternatives)
        if rest:
            raise ValueError
        borders = np.cumsum([num_tokens, num_tokens, num_tokens, num_alternatives * num_tokens])
        token_ids, logprobs, ranks, ids, alternatives = np.split(words, borders)
        shape = (num_tokens, num_alternatives)
        return cls(
            token_ids,
            logprobs.view("<f4"),
            ranks,
            ids.reshape(shape),
            alternatives.view("<f4").reshape(shape),
        )

    def tokens(self) -> list[TokenLogprobs]:
        """The same values, token by token."""
        alternatives = zip(self.alternative_ids.tolist(), self.alternatives.tolist(), strict=True)
        return [
            TokenLogprobs(logprob, rank, tuple(zip(ids, logprobs, strict=True)))
            for logprob, rank, (ids, logprobs) in zip(
                self.logprobs.tolist(), self.ranks.tolist(), alternatives, strict=True
            )
        ]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has a row; ``num_cached_tokens`` of its prompt were found in the cache."""

    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Generated:
    """One more token of the request. If it ``is_last``, the terminal event follows at once."""

    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Embedded:
    """The embedding of the prompt, float32[hidden_size] of length 1: the hidden state of its last
    token under the model's final norm, normalized."""

    vector: FloatArray


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended without an error; ``stop_token_id`` is set if such a token ended it."""

    reason: FinishReason
    stop_token_id: TokenId | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error."""

    error: MiniSGLError


TerminalEvent: TypeAlias = Finished | Failed
Event: TypeAlias = Admitted | PromptLogprobs | Generated | Embedded | TerminalEvent
Sink: TypeAlias = Callable[[Event], None]
"""Takes the events of one request. Called on the engine's thread, so it must only enqueue."""
