"""What the engine is asked for one prompt, and what the operator adds to it.

Must not know a chat, or any API's JSON.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from minisgl_client.parameters import Parameters

MAX_STOPS: Final = 16
_SALT: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What the engine takes as a salt."""
_LEAST_TOP_P: Final = 1e-9
"""It leaves the likeliest token alone."""
NO_LIMIT: Final = -1
"""``max_tokens`` that asks for as many tokens as there is room for, as in llama.cpp."""
_MOST_TOKENS: Final = 2**31 - 1
"""The largest ``max_tokens`` that the engine takes."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A prompt in one of three forms, and its parameters, including the number of choices.

    ``own_stop`` is the stop string that the gateway has added to end the answer after its first
    call.
    """

    parameters: Parameters
    prompt: str | None = None
    input_ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    own_stop: str | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator and the caller's key add to each request.

    ``chat_tokens`` is the default ``max_tokens`` of a chat. With ``shortens``, a ``max_tokens``
    that does not fit the context is lowered instead of refused. ``salt`` separates the cached
    prefixes of one key from those of others. ``adapter`` is the LoRA adapter that the request names
    as its model.
    """

    timeout_s: float
    chat_tokens: int
    shortens: bool = False
    salt: str = ""
    adapter: str | None = None

    def parameters(self, cache_salt: str | None) -> Parameters:
        """What is added to every request, by the engine's names: the adapter, a salt of which the
        request's own is part, and the time left, which is never none."""
        adapter = Parameters() if self.adapter is None else Parameters(lora_name=self.adapter)
        return Parameters(
            **adapter,
            cache_salt=_common_salt(self.salt, cache_salt),
            timeout_ms=max(1, round(self.timeout_s * 1000)),
        )


def sampling_parameters(given: Mapping[str, Any]) -> Parameters:
    """The caller's parameters of sampling, as the schemas have checked them, by the engine's names.

    With ``top_p`` 0 the likeliest token is taken, as in OpenAI's API; to the engine 0 is off.
    """
    parameters = cast(Parameters, dict(given))
    if "top_p" in parameters:
        parameters["top_p"] = parameters["top_p"] or _LEAST_TOP_P
    return parameters


def shared_parameters(
    policy: Policy,
    max_tokens: int | None,
    default_tokens: int,
    *,
    cache_salt: str | None,
    tells_counts: bool,
) -> Parameters:
    """What chats and completions ask for in the same way; the engine's defaults are OpenAI's."""
    is_bounded = max_tokens is not None and max_tokens != NO_LIMIT
    if max_tokens is None:
        max_tokens = default_tokens
    return Parameters(
        **policy.parameters(cache_salt),
        max_tokens=_MOST_TOKENS if max_tokens == NO_LIMIT else max_tokens,
        fit_max_tokens=policy.shortens or not is_bounded,
        return_stop_reason=False,
        return_num_input_tokens=tells_counts,
        return_num_output_tokens=tells_counts,
        return_num_cached_tokens=tells_counts,
    )


def _common_salt(of_key: str, of_request: str | None) -> str | None:
    """A salt with which only requests of the same key and with the same salt share prefixes.

    A request's may be any text; what the engine does not take as a salt is hashed.
    """
    if not of_request:
        return of_key or None
    if not of_key and _SALT.fullmatch(of_request):
        return of_request
    return hashlib.sha256(f"{of_key} {of_request}".encode()).hexdigest()
