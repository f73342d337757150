"""What errors of the engine, and on the way to it, mean to a caller.

Knows the errors of ``minisgl_client``, whose messages the server wrote for callers, and how the
engine's and Triton's sentences begin. Any other error becomes one sentence without details. Some
clients look for OpenAI's or Anthropic's phrases, so the error for a prompt that is too long uses
them. Must not know any API's JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Final

from minisgl_client import errors as client

from minisgl_gateway.errors import (
    ApiError,
    cancelled,
    deadline_passed,
    internal,
    invalid,
    no_model,
    shutting_down,
    too_long,
    unavailable,
    unsupported,
)


def api_error_of_finish(reason: str | None) -> ApiError:
    """The error that a finish reason other than ``stop`` and ``length`` means."""
    by_reason = {"timeout": deadline_passed, "cancelled": cancelled}
    return by_reason.get(reason or "", internal)()


_NO_NAMES: Final[Mapping[str, str]] = {}


def api_error(
    error: client.MinisglError,
    fields: Container[str],
    names: Mapping[str, str] = _NO_NAMES,
    of_form: Callable[[str], tuple[str, str]] = lambda message: ("structured_outputs", message),
) -> ApiError:
    """What an error of the engine, or on the way to it, means to a caller.

    ``fields`` are those of the request; the engine's sentences begin with the one at fault.
    ``names`` are the API's names for OpenAI's ``prompt``, ``max_tokens`` and others, if they
    differ. For a sentence about the form of the answer, ``of_form`` returns the parameter that
    asked for it, and the sentence as it reads there.
    """
    if found := _by_sentence(str(error)):
        return found
    if isinstance(error, (client.InvalidArgument, client.Unsupported)):
        return _at_fault(error, fields, names, of_form)
    if isinstance(error, client.Timeout):
        return deadline_passed()
    if isinstance(error, client.ConnectionFailed):
        return unavailable("the engine cannot be reached")
    if isinstance(error, client.ConnectionLost):
        return unavailable("the connection to the engine broke")
    if isinstance(error, client.Unavailable) or is_lost(error):
        return unavailable(str(error))
    if isinstance(error, client.Closed):  # by the gateway when it ends
        return shutting_down()
    if isinstance(error, client.Cancelled):
        return cancelled()
    return internal()


def _by_sentence(sentence: str) -> ApiError | None:
    """What an error means whose sentence says it, whatever kind of error that is; None for any
    other sentence."""
    if _NO_MODEL.match(sentence):  # callers know the model by the gateway's name, not by this one
        return unavailable("the engine does not have the model")
    if _DEAD.search(sentence):
        return unavailable("a process of the engine has died")
    if _STOPPING in sentence:
        return unavailable("the server is shutting down")
    if unknown := _NO_ADAPTER.match(sentence):  # the gateway's list of adapters was older
        return no_model(unknown[1])
    if sentence in _ONLY_EMBEDS:
        return unsupported("the model only makes embeddings, for /v1/embeddings", "model")
    return None


def _at_fault(
    error: client.InvalidArgument | client.Unsupported,
    fields: Container[str],
    names: Mapping[str, str],
    of_form: Callable[[str], tuple[str, str]],
) -> ApiError:
    """The same for an error about a field of the request, or about the length of its prompt."""
    make = invalid if isinstance(error, client.InvalidArgument) else unsupported
    if found := _FORM.match(str(error)):
        param, message = of_form(str(error).removeprefix(found["kind"] or ""))
        return make(f"{param}: {message}", param)
    if "tokens" in fields:
        names = {"input_ids": "tokens", **names}
    told = {**_NAMES, **names}
    known = {name: names.get(other, other) for name, other in told.items()}
    words = re.compile(rf"\b(?:{'|'.join(known)})\b")
    message = words.sub(lambda found: known[found[0]], str(error))
    word = re.split(r"\W", message, maxsplit=1)[0]
    if word == "prompt" and word not in fields:
        word = "messages"
    param_at_fault = word if word in fields else None
    if too := _TOO_LONG.match(str(error)):
        sentence = _too_long_sentence(too, fields, names)
        return too_long(sentence, param_at_fault, _too_long_for_anthropic(too, sentence))
    return make(message, param_at_fault)


def is_lost(error: client.MinisglError) -> bool:
    """Whether the engine says that a request was lost with one of its processes."""
    return str(error) in _LOST


_FORM: Final = re.compile(
    r"(?P<kind>(?:json_schema|json_object|regex|choice|grammar|structural_tag): )"
    r"|structured_outputs\b|(?:a|the) (?:grammar|JSON schema|choice|structural tag) "
)
"""How the engine's sentences about the form of an answer begin."""
_LOST: Final = frozenset(
    {
        "the detokenizer does not answer",
        "the detokenizer has gone",
        "the detokenizer was restarted and lost this request",
        "the engine is down",
        "the engine stopped after an internal error",
        "the replica that served the request has ended",
    }
)
"""How the engine's sentences say that a request was lost with a process that is restarted."""
_NO_MODEL: Final = re.compile(r"Request for unknown model: '.*' is not found$")
"""How Triton says that it has no such model."""
_DEAD: Final = re.compile(r"Stub process '.*' is not healthy")
"""How Triton says that the process of a model has died."""
_STOPPING: Final = "Server is stopping"
"""How Triton refuses a request after it has got SIGTERM."""
_NO_ADAPTER: Final = re.compile(r"LoRA (.*) is not supported, we currently support ", re.DOTALL)
"""How the engine says that it has no such adapter; callers know adapters as models."""
_ONLY_EMBEDS: Final = frozenset(
    {
        "embed must be true: the checkpoint has no output head",
        "num_prompt_logprobs needs an output head: the checkpoint has none",
    }
)
"""How the engine says that the model makes no answers; callers know no ``embed``."""
_TOO_LONG: Final = re.compile(
    r"(?:max_tokens (?P<max_tokens>\d+) with a )?prompt of (?P<length>(?:more than )?\d+ \w+) "
    r"(?:does not fit the context of|does not fit the KV cache, which has room for|"
    r"exceeds the context of|needs \d+ pages of) (?P<context>\d+)"
    r"(?: tokens, the KV cache has (?P<num_pages>\d+))?"
)
"""How the engine says that a prompt is too long; at this code OpenAI's clients shorten the chat."""


def _too_long_sentence(
    found: re.Match[str], fields: Container[str], names: Mapping[str, str]
) -> str:
    """The same in OpenAI's words, for which clients look."""
    prompt = "messages" if "messages" in fields else names.get("prompt", "prompt")
    context = _context(found)
    sentence = f"This model's maximum context length is {context} tokens. However, "
    if found["max_tokens"] is None:
        fills = found["length"] == f"{context} tokens"
        answer = ", and the answer needs one more token at least" if fills else ""
        return (
            f"{sentence}your {prompt} resulted in {found['length']}{answer}. "
            f"Please reduce the length of the {prompt}."
        )
    num_prompt, num_answer = int(found["length"].split()[0]), int(found["max_tokens"])
    return (
        f"{sentence}you requested {num_prompt + num_answer} tokens ({num_prompt} in the {prompt}, "
        f"{num_answer} in the completion). Please reduce the length of the {prompt} or completion."
    )


def _too_long_for_anthropic(found: re.Match[str], sentence: str) -> str:
    """The same in Anthropic's words. From these numbers Claude Code learns how many tokens it may
    ask for, and asks again."""
    if found["max_tokens"] is None:
        return f"prompt is too long: {sentence}"
    num_prompt, num_answer = found["length"].split()[0], found["max_tokens"]
    return (
        f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_answer} > "
        f"{_context(found)}, decrease input length or `max_tokens` and try again"
    )


def _context(found: re.Match[str]) -> int:
    """The most tokens of a prompt and its answer."""
    context = int(found["context"])
    if found["num_pages"] is None:
        return context
    return context * int(found["num_pages"]) + 1  # the last token needs no place in the pages


_NAMES: Final = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "num_logprobs": "logprobs",
    "priority_level": "priority",
}
"""The engine's names that differ from OpenAI's, and OpenAI's names for them."""
