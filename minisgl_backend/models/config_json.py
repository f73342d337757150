"""Reading config.json and files like it: typed values, and errors that name the key.

Knows JSON. Must not know any key: ``common_fields`` and ``families`` do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.errors import ConfigError

LFS_POINTER: Final = b"version https://git-lfs"
"""How a file begins that Git LFS has not fetched."""
NOT_FETCHED: Final = "it only points to a file that Git LFS has not fetched (git lfs pull)"
_MOST: Final = 2**31 - 1


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``ConfigError`` if there is none."""
    try:
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise ConfigError(f"{path} cannot be read: {NOT_FETCHED}")
        value = json.loads(content.decode())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


class ConfigReader:
    """Typed access to a config.json; null counts as absent, except in ``integer_or_null``.

    ``spellings`` has the file's own names of keys that are read under others, for errors.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        spellings: Mapping[str, str] = MappingProxyType({}),
    ):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = frozenset(values) - frozenset(self.values)
        self.where = where
        self.spellings = spellings

    def with_defaults(self, **defaults: Any) -> ConfigReader:
        """The same with ``defaults`` for keys that are absent; null stays null."""
        return self._with({**defaults, **dict.fromkeys(self.nulls), **self.values})

    def with_values(self, **values: Any) -> ConfigReader:
        """The same with ``values`` in place of what the file says."""
        return self._with({**dict.fromkeys(self.nulls), **self.values, **values})

    def respelled(self, names: Mapping[str, str]) -> ConfigReader:
        """The same with other names for the keys in ``names`` that are present."""
        found = {names[key]: key for key in names if key in self.values}
        values = {name: self.values[key] for name, key in found.items()}
        return ConfigReader(
            {**dict.fromkeys(self.nulls), **self.values, **values}, self.where, found
        )

    def part(self, key: str) -> ConfigReader:
        """The object under ``key``; ``ConfigError`` if it is absent."""
        if not self.table(key):
            raise ConfigError(f"{self.where}: {key} is missing")
        return ConfigReader(self.table(key), f"{self.where}: {key}")

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MOST
    ) -> int:
        """An integer from ``minimum`` to ``maximum``; without a default it must be present."""
        value = self._get(key, default)
        if type(value) is not int or value < minimum:
            raise self.error(key, f"an integer >= {minimum}", value)
        if value > maximum:
            raise self.error(key, f"at most {maximum}", value)
        return value

    def integer_or_null(self, key: str, default: int) -> int | None:
        """Like ``integer``, but null means None rather than the default."""
        return None if key in self.nulls else self.integer(key, default)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        maximum: float = math.inf,
        or_zero: bool = False,
    ) -> float:
        """A positive, finite number up to ``maximum``; with ``or_zero``, also 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, "a number", value)
        try:
            number = float(value)
        except OverflowError:  # JSON's integers may be of any size
            number = math.inf
        if not math.isfinite(number) or number < 0 or (number == 0 and not or_zero):
            raise self.error(key, "positive and finite", value)
        if number > maximum:
            raise self.error(key, f"at most {maximum:g}", value)
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def word(self, key: str, default: str) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """A JSON object; empty if it is absent."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers >= 0, or a single one; empty if it is absent."""
        value = self.values.get(key, [])
        found = value if isinstance(value, list) else [value]
        if any(type(number) is not int or not 0 <= number <= _MOST for number in found):
            raise self.error(key, "an integer >= 0 or a list of them", value)
        return found

    def numbers(self, key: str, *, or_zero: bool = False) -> tuple[float, ...]:
        """A list of positive, finite numbers, with ``or_zero`` also 0; empty if it is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self.error(key, "a list of numbers", value)
        named = {f"{key}[{index}]": entry for index, entry in enumerate(value)}
        entries = ConfigReader(named, self.where)
        return tuple(entries.number(name, or_zero=or_zero) for name in named)

    def layer_kinds(
        self, kinds: Collection[str], num_layers: int, key: str = "layer_types"
    ) -> list[str] | None:
        """The kind of each layer, from a list of ``num_layers`` of ``kinds``; None if it is
        absent."""
        value = self.values.get(key)
        if value is None:
            return None
        found: list[str] = value if isinstance(value, list) else []
        if len(found) != num_layers or any(kind not in kinds for kind in found):
            raise self.error(key, f"{num_layers} of {', '.join(kinds)}", value)
        return found

    def error(self, key: str, wanted: str, value: Any) -> ConfigError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        key = self.spellings.get(key, key)
        return ConfigError(f"{self.where}: {key} must be {wanted}, got {shown}")

    def _with(self, values: Mapping[str, Any]) -> ConfigReader:
        return ConfigReader(values, self.where, self.spellings)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise ConfigError(f"{self.where}: {self.spellings.get(key, key)} is missing")
        return value
