"""Converts one value of the wire to a Python value, and checks its range.

A value comes as a numpy array (a tensor), as a string, bool, int or float (a request parameter), or
as any JSON value (``sampling_parameters``). Strings are converted if a number or a flag is
expected. Numbers are rounded to float32, so that a value given twice, once as a tensor, is equal.
A JSON object must not repeat a key, since readers disagree on which of the two values counts.

Everything here raises ``InvalidRequest`` with one short sentence, whatever comes in. Must not know
rules about several values, or what a value is used for.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from ctypes import c_float
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.request import IntArray
from minisgl_backend.wire.entries import Input, Kind

_FLAGS: Final = {"true": True, "1": True, "false": False, "0": False}
_INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1
_MAX_DIGITS: Final = 40
"""Longer numbers are out of every range, and slow to convert."""


def parse_json(name: str, text: str) -> Any:
    """The value of a JSON text. An object with a repeated key is refused."""
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except InvalidRequest as error:
        raise InvalidRequest(f"{name} {error}") from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} must be valid JSON") from None


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, as ``json`` gives it; of equal keys it would keep the last. The message of the
    ``InvalidRequest`` lacks its subject."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequest(f"has the key {quoted(name)} twice")
        found[name] = value
    return found


def quoted(value: Any) -> str:
    """A value as shown in an error message, in one line of at most 60 characters; a longer value is
    described instead."""
    try:
        shown = value if isinstance(value, float) else repr(value)
    except ValueError:  # an int of more digits than Python converts
        shown = "a number of thousands of digits"
    line = _short(shown) if isinstance(shown, float) else shown
    if len(line) <= 60:
        return line
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} items"
    if isinstance(value, int):
        return f"a number of {len(line)} digits"
    return f"a value of {len(line)} characters"


def _short(number: float) -> str:
    """The number in just enough digits to be unlike any other float32: 1.0000001 is not 1."""
    line = f"{number:g}"
    return line if round_to_float32(float(line)) == round_to_float32(number) else repr(number)


def from_tensor(name: str, entry: Input, array: npt.NDArray[Any]) -> Any:
    """The value of a tensor of any shape: its only element, or all of them for a list."""
    items = array.reshape(-1).tolist()
    if entry.kind in (Kind.TEXTS, Kind.INTEGERS):
        return from_json(name, entry, items)
    if len(items) != 1:
        raise InvalidRequest(f"{name} must be one value, got {len(items)}")
    return from_json(name, entry, items[0])


def from_parameter(name: str, entry: Input, value: Any) -> Any:
    """The value of a request parameter; a list comes as JSON in a string."""
    if isinstance(value, str) and entry.kind in (Kind.TEXTS, Kind.INTEGERS):
        try:
            items = json.loads(value)
        except (ValueError, RecursionError):
            items = None
        if entry.kind is Kind.INTEGERS and type(items) in (int, list):
            return from_json(name, entry, items)
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return from_json(name, entry, items)
    return from_json(name, entry, value)


def from_json(name: str, entry: Input, value: Any) -> Any:
    """The value of a JSON value (or of a tensor's element, which may be bytes)."""
    if entry.kind is Kind.TEXT:
        return to_text(name, value)
    if entry.kind is Kind.FLAG:
        return _to_flag(name, value)
    if entry.kind is Kind.TEXTS:
        items = value if isinstance(value, list) else [value]
        return tuple(filter(None, (to_text(name, item) for item in items)))
    if entry.kind is Kind.INTEGERS:
        items = value if isinstance(value, list) else [value]
        return tuple(_to_int(name, entry, item) for item in items)
    if entry.kind in (Kind.INTEGER, Kind.SEED):
        return _to_int(name, entry, value)
    if entry.kind is Kind.BIASES:
        return _to_biases(name, value)
    if entry.kind is Kind.JSON:
        return as_json(name, value) if isinstance(value, dict) else to_text(name, value)
    assert entry.kind is Kind.NUMBER
    return _to_number(name, entry, value)


def as_json(name: str, value: Any) -> str:
    """The JSON text of a value. In process, a value may not have one."""
    try:
        return to_text(name, json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest(f"{name} must be valid JSON") from None


def to_text(name: str, value: Any) -> str:
    """A string that UTF-8 can encode, from a string or from bytes."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeError:
        raise InvalidRequest(f"{name} must be valid UTF-8") from None
    raise InvalidRequest(f"{name} must be a string, got {quoted(value)}")


def _to_flag(name: str, value: Any) -> bool:
    if isinstance(value, bytes):
        value = to_text(name, value)
    word = str(value).lower() if type(value) in (bool, int, str) and value != "" else ""
    if word not in _FLAGS:
        raise InvalidRequest(f"{name} must be true or false, got {quoted(value)}")
    return _FLAGS[word]


def _to_int(name: str, entry: Input, value: Any) -> int:
    number = value
    if isinstance(value, str) and _may_be_number(value):
        with suppress(ValueError):
            number = int(value)
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if type(number) is not int:
        raise InvalidRequest(f"{name} must be an integer, got {quoted(value)}")
    low = entry.minimum if entry.minimum is not None else _INT32_MIN
    high = entry.maximum if entry.maximum is not None else INT32_MAX
    if number < low and entry.minimum is not None:
        raise InvalidRequest(f"{name} must be >= {low:g}, got {quoted(number)}")
    if number < low or number > high:
        raise InvalidRequest(f"{name} must be in {int(low)} .. {int(high)}, got {quoted(number)}")
    return number


def _to_number(name: str, entry: Input, value: Any) -> float:
    number: float | None = None
    if type(value) in (int, float) or (isinstance(value, str) and _may_be_number(value)):
        try:
            number = round_to_float32(float(value))
        except OverflowError:
            number = math.inf
        except ValueError:
            pass
    if number is None:
        raise InvalidRequest(f"{name} must be a number, got {quoted(value)}")
    if (
        not math.isfinite(number)
        or (entry.minimum is not None and number < entry.minimum)
        or (entry.above is not None and number <= entry.above)
        or (entry.maximum is not None and number > entry.maximum)
    ):
        shown = quoted(float(value) if isinstance(value, str) else value)
        raise InvalidRequest(f"{name} must be {_range_of(entry)}, got {shown}")
    return number


def _may_be_number(text: str) -> bool:
    """Whether Python should read a number in the text: it also takes 1_000, which JSON does not."""
    return len(text) <= _MAX_DIGITS and "_" not in text


def round_to_float32(value: float) -> float:
    """The nearest float32; infinity beyond its range."""
    return c_float(value).value + 0.0  # -0.0 becomes 0.0


def _range_of(entry: Input) -> str:
    """The range of a number in words."""
    terms = ["finite"]
    if entry.minimum is not None:
        terms.append(f">= {entry.minimum:g}")
    if entry.above is not None:
        terms.append(f"> {entry.above:g}")
    if entry.maximum is not None:
        terms.append(f"<= {entry.maximum:g}")
    return " and ".join(filter(None, (", ".join(terms[:-1]), terms[-1])))


def _to_biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(value, (str, bytes)):
        text = to_text(name, value)
        value = parse_json(name, text) if text else {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {quoted(value)}")
    token = Input(name=name, kind=Kind.INTEGER, meaning="", minimum=0)
    bias = Input(name=name, kind=Kind.NUMBER, meaning="", minimum=-100, maximum=100)
    pairs = {
        _to_int(f"{name}: a token id", token, key): _to_number(f"{name}: a bias", bias, number)
        for key, number in value.items()
    }
    if len(pairs) != len(value):
        raise InvalidRequest(f"{name} has a token id twice")
    return tuple(sorted(pairs.items()))


def token_ids(name: str, array: npt.NDArray[Any]) -> IntArray:
    """The ids of a tensor of any shape, int32[num_tokens]; some may be negative, or not in the
    vocabulary."""
    if array.dtype.kind not in "iu":
        raise InvalidRequest(f"{name} must be integers, got {array.dtype}")
    flat = array.reshape(-1)
    if flat.dtype != np.int32 and flat.size and (flat.min() < 0 or flat.max() > INT32_MAX):
        raise InvalidRequest(f"{name} must be in 0 .. {INT32_MAX}")
    return np.ascontiguousarray(flat, dtype=np.int32)
