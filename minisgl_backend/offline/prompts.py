"""Turns the prompts and parameters of a call into one ``Generation`` each, by the server's checks.

Knows the forms of prompts and parameters in Python. Must not know tokenizers or the engine. Raises
``RequestError`` with the server's messages, whatever the input; with several prompts the message
begins with the prompt at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import InvalidRequest, RequestError, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.request import EMPTY
from minisgl_backend.wire.defaults import Defaults
from minisgl_backend.wire.generation import Generation
from minisgl_backend.wire.parse import parse_values
from minisgl_backend.wire.values import as_json, quoted

Message: TypeAlias = Mapping[str, Any]
"""One message of a chat, as in OpenAI's schema: ``role``, ``content``, ``tool_calls``, ..."""
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
"""[num_prompt_tokens]"""
Prompt: TypeAlias = str | TokenIds | Sequence[Message]
Params: TypeAlias = Mapping[str, Any]
"""Request parameters by the names of the wire."""

_NOT_HERE: Final[Mapping[str, str]] = {
    "text_input": "is the prompt, which is not a parameter in process",
    "messages": "are the prompt, which is not a parameter in process",
    "input_ids": "are the prompt, which is not a parameter in process",
    "sampling_parameters": "is not supported in process: give its values as parameters",
    "stream": "is not supported in process: call LLM.stream",
    "stop_request": "is not supported in process: close the stream",
    "min_chunk_interval_ms": "is not supported in process",
}
_JSON: Final = ("messages", "tools", "chat_template_kwargs", "structured_outputs")
"""Parameters that the wire carries as JSON texts."""


def read_prompts(
    prompts: Prompt | Sequence[Prompt],
    params: Params | Sequence[Params] | None,
    *,
    stream: bool,
    arrival_time_ns: int,
    defaults: Defaults,
    limits: Limits,
) -> list[Generation]:
    """One generation per prompt, in order."""
    each = [prompts] if _is_one(prompts) else list(prompts)
    generations = []
    for index, (prompt, own) in enumerate(zip(each, _one_each(params, len(each)), strict=True)):
        with naming(index if len(each) > 1 else None):
            generation = parse_values(
                {**_given(own), **_prompt(prompt), "stream": stream},
                arrival_time_ns=arrival_time_ns,
                defaults=defaults,
                limits=limits,
            )
            assert isinstance(generation, Generation)  # a stop_request is refused above
            generations.append(generation)
    return generations


def with_all(params: object, more: Params) -> Any:
    """The parameters of a call, unchecked, with some more that apply to all its prompts."""
    if isinstance(params, Sequence) and not isinstance(params, str):
        return [{**own, **more} if isinstance(own, Mapping) else own for own in params]
    if params is None:
        return more
    return {**params, **more} if isinstance(params, Mapping) else params


@contextmanager
def naming(index: int | None) -> Iterator[None]:
    """Put the prompt's ``index``, unless it is None, before the messages of errors in the block."""
    try:
        yield
    except RequestError as error:
        if index is None:
            raise
        raise type(error)(f"prompts[{index}]: {error}") from None


def _is_one(prompts: object) -> bool:
    """Whether this is one prompt, not a list of prompts."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray) and prompts.ndim:
        return prompts.ndim == 1
    if not _is_sequence(prompts):
        raise InvalidRequest(
            "prompts must be a string, token ids, messages, or a list of these, "
            f"got {quoted(prompts)}"
        )
    return len(prompts) > 0 and isinstance(prompts[0], int | float | np.number | Mapping)


def _is_sequence(value: object) -> TypeGuard[Sequence[object]]:
    """Whether this may be a list of tokens, messages or prompts, which text and bytes are not."""
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def _one_each(params: object, num_prompts: int) -> Sequence[Any]:
    """The parameters of each prompt, unchecked."""
    if params is None:
        return [{}] * num_prompts
    if isinstance(params, Mapping):
        return [params] * num_prompts
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise InvalidRequest(f"params must be a mapping or a list of them, got {quoted(params)}")
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"params must be one mapping or one for each prompt, got {len(params)} "
            f"for {num_prompts} prompts"
        )
    return params


def _prompt(prompt: object) -> dict[str, Any]:
    """The prompt under its name on the wire."""
    if isinstance(prompt, str):
        return {"text_input": prompt}
    if isinstance(prompt, np.ndarray):
        return {"input_ids": _of_one_axis(prompt)}
    if not _is_sequence(prompt):
        raise InvalidRequest(
            f"a prompt must be a string, token ids or messages, got {quoted(prompt)}"
        )
    if not len(prompt):
        return {"input_ids": EMPTY}
    if isinstance(prompt[0], Mapping):
        return {"messages": as_json("messages", prompt)}
    if not {bool, np.bool_}.isdisjoint(map(type, prompt)):  # NumPy would take them for 0 and 1
        raise InvalidRequest("input_ids must be integers, got bool")
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        raise InvalidRequest("input_ids must be integers") from None
    return {"input_ids": _of_one_axis(ids)}


def _of_one_axis(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The ids of one prompt; those of several would become one longer prompt."""
    if ids.ndim != 1:
        raise InvalidRequest(f"input_ids of a prompt must be of one axis, got shape {ids.shape}")
    return ids


def _given(params: object) -> dict[str, Any]:
    """The parameters as JSON would have them."""
    if not isinstance(params, Mapping):
        raise InvalidRequest(f"params must be a mapping or a list of them, got {quoted(params)}")
    given = {}
    for name, value in params.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"unknown parameter {quoted(name)}")
        if value is None:
            continue
        if name in _NOT_HERE:
            raise Unsupported(f"{name} {_NOT_HERE[name]}")
        if name in _JSON and not isinstance(value, str):
            value = as_json(name, value)
        elif isinstance(value, list | tuple):
            value = [_plain(one) for one in value]
        elif isinstance(value, Mapping):
            value = {_plain(key): _plain(one) for key, one in value.items()}
        given[name] = _plain(value)
    return given


def _plain(value: Any) -> Any:
    """Python's own numbers for those of NumPy."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
