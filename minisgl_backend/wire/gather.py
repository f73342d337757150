"""Collects the values of a request from the three places in which it may give them.

These are tensors, request parameters and the JSON object ``sampling_parameters``; in process, one
mapping replaces all three. Each value is converted and checked by itself (``values``). Unknown
names, options that are not offered, and contradictory values are refused. Must not know how values
depend on each other: ``parse`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl_backend.config import did_you_mean
from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.wire import grammars, values
from minisgl_backend.wire.entries import Input
from minisgl_backend.wire.parameters import (
    BY_NAME,
    NEUTRAL,
    TRITON_NAMES,
    TRITON_PREFIXES,
)
from minisgl_backend.wire.values import parse_json


def gather(
    inputs: Mapping[str, npt.NDArray[Any]], parameters: Mapping[str, Any], limits: Limits
) -> dict[str, Any]:
    """The values as Python objects, by the names of the table's entries.

    Raises ``InvalidRequest``, or ``Unsupported`` for options that are known but not offered.
    """
    found = _Found()
    for name, array in inputs.items():
        if name == "input_ids":
            found.put(name, BY_NAME[name], values.token_ids(name, array))
        elif entry := _known(name, array):
            found.put(name, entry, values.from_tensor(name, entry, array))
    for name, value in parameters.items():
        if is_of_triton(name):
            continue
        name, value = found.respelled(name, value)
        if entry := _known(name, value):
            value = values.from_parameter(name, entry, value)
            if name == "input_ids":
                value = values.token_ids(name, np.array(value, dtype=np.int64))
            found.put(name, entry, value)
    if text := found.by_key.pop("sampling_parameters", ""):
        if len(text.encode()) > limits.prompt_bytes:
            raise InvalidRequest(f"sampling_parameters must be at most {limits.prompt_bytes} bytes")
        found.put_all(_sampling_parameters(text), top_level=False)
    return found.all()


def is_of_triton(name: str) -> bool:
    """Whether a request parameter is one of Triton itself."""
    return name in TRITON_NAMES or name.startswith(TRITON_PREFIXES)


def gather_values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same from one mapping of JSON values; None means that a value is not given."""
    found = _Found()
    found.put_all(given, top_level=True)
    return found.all()


class _Found:
    """Values by entry, and the names under which they were given."""

    def __init__(self) -> None:
        self.by_key: dict[str, Any] = {}
        self._given: dict[str, str] = {}
        self._has_logprobs_flag = False

    def all(self) -> dict[str, Any]:
        """The values, with those that a spelling implies."""
        if self._has_logprobs_flag:
            self.by_key.setdefault("num_logprobs", 0)
        return self.by_key

    def respelled(self, name: str, value: Any) -> tuple[str, Any]:
        """The parameter under its main name. ``logprobs`` as a flag (OpenAI's chat schema) becomes
        ``return_logprobs``, for the chosen tokens alone if there is no ``top_logprobs``."""
        name, value = grammars.respelled(name, value)
        if name == "logprobs" and (type(value) is bool or value in ("true", "false")):
            self._has_logprobs_flag |= value in (True, "true")
            return "return_logprobs", value
        return name, value

    def put(self, name: str, entry: Input, value: Any) -> None:
        """Add a value. Raises ``InvalidRequest`` if its entry already has a different one."""
        key = entry.name
        if key in self._given and not _equal(self.by_key.get(key), value):
            first = self._given[key]
            also = f" (also as {first})" if first != name else ""
            raise InvalidRequest(f"{name} is given twice{also}, with different values")
        self.by_key[key] = value
        self._given.setdefault(key, name)

    def put_all(self, given: Mapping[str, Any], *, top_level: bool) -> None:
        """Add JSON values. Unless they are ``top_level``, they are from ``sampling_parameters``."""
        for name, value in given.items():
            name, value = self.respelled(name, value)
            if (entry := _known(name, value)) and value is not None:
                if entry.top_level and not top_level:
                    raise InvalidRequest(f"{name} may not stand in sampling_parameters")
                self.put(name, entry, values.from_json(name, entry, value))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    return bool(a == b)


def _sampling_parameters(text: str) -> dict[str, Any]:
    given = parse_json("sampling_parameters", text)
    if not isinstance(given, dict):
        raise InvalidRequest(
            f"sampling_parameters must be a JSON object, got {values.quoted(given)}"
        )
    return given


def _known(name: str, value: Any) -> Input | None:
    """The entry of a name; None if the option is not offered and has its neutral value."""
    if name in NEUTRAL:
        given = _elements(value) if isinstance(value, np.ndarray) else value
        if given is not None and not any(_is_neutral(given, v) for v in NEUTRAL[name]):
            raise Unsupported(f"{name} is not supported, got {values.quoted(given)}")
        return None
    entry = BY_NAME.get(name)
    if entry is None:
        hint = did_you_mean(name[:60], [*BY_NAME, *NEUTRAL, *grammars.SPELLINGS])
        told = values.quoted(name) if len(name) <= 50 else f"of {len(name)} characters"
        raise InvalidRequest(f"unknown parameter {told}{hint}")
    return entry


def _elements(array: npt.NDArray[Any]) -> Any:
    """The only element of a tensor, or a list of all."""
    items = array.reshape(-1).tolist()
    if len(items) != 1:
        return items
    (item,) = items
    return item.decode(errors="replace") if isinstance(item, bytes) else item


def _is_neutral(given: Any, neutral: Any) -> bool:
    if isinstance(given, str) and not isinstance(neutral, str):
        try:
            given = json.loads(given.lower())
        except (ValueError, RecursionError):
            return False
    return bool(given == neutral) and isinstance(given, bool) is isinstance(neutral, bool)
