"""How large the result of a template's operation would be, known before it is made.

Knows Python's strings, numbers and formats, and Jinja's filters. Must not know templates or
renderings. A size is a number of characters, or of items of a list. No prediction is smaller than
the result, and none takes much more time or memory than the largest result that is allowed.

Only the methods of strings, and the filters, in these tables can be used. None makes bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any, Final

from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup, escape

_MAX_INDENT: Final = 8
_MAX_BITS: Final = 14_283
"""Python writes numbers of at most 4,300 digits."""
_MOST_DIGITS_OF_FLOAT: Final = 450
"""With separators of thousands, and the digits after the point that no precision asks for."""
_ESCAPED: Final = 5
"""No character is more than this many in HTML."""
_CASED: Final = 3
"""No character is more than this many in another case."""
_PIECE: Final = 4096
_CONVERSION: Final = re.compile(
    r"%(?:(?:\(([^()]*)\))?[#0\- +]*([0-9]*)(?:\.([0-9]*))?[hlL]?([diouxXeEfFgGcrsa%]))?"
)
"""A field of ``%``: its key, width, precision and kind. A field that is not understood, such as
``%*d``, has no kind."""
_HARMLESS_METHODS: Final = frozenset(
    "count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower"
    " isnumeric isprintable isspace istitle isupper join lstrip partition removeprefix removesuffix"
    " rfind rindex rpartition rsplit rstrip split splitlines startswith strip".split()
)
"""Methods of strings whose results are no larger than the string, and ``join``, whose items are
checked by ``Sizes.listed``."""
_HARMLESS_FILTERS: Final = frozenset(
    "abs attr count d default filesizeformat first float int items join last length list"
    " map max min random reject rejectattr reverse select selectattr sort sum unique".split()
)
"""Filters whose results are no larger than what they get; ``join`` and ``sum``, which check each
item; and ``LISTED``."""
_ESCAPING_FILTERS: Final = frozenset({"format", "indent", "truncate"})
"""Filters that escape what is not marked as safe if something else is."""
LISTED: Final = frozenset("groupby max min sort unique".split())
"""Filters that may make a text of each item, and so get a list of ``Sizes.listed``."""
_END: Final = object()


class OutOfBounds(Exception):
    """A template took too long or made too much; the message continues ``the template ...``."""


class Sizes:
    """Refuses operations whose results would be larger than ``max_size``.

    Predictions of methods and filters are functions that take what the method or the filter takes.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._methods: dict[str, Callable[..., int]] = {
            **dict.fromkeys(("casefold", "lower", "swapcase", "upper"), _cased),
            **dict.fromkeys(("capitalize", "title"), _cased),
            **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
            "expandtabs": _expanded,
            "replace": self._replaced_in,
        }
        self._filters: dict[str, Callable[..., int]] = {
            **dict.fromkeys(("capitalize", "lower", "title", "upper"), self._cased_text),
            **dict.fromkeys(("safe", "string", "striptags", "trim", "wordcount"), self._as_text),
            **dict.fromkeys(("e", "escape"), self._escaped),
            "batch": lambda value, linecount, fill_with=None: linecount,
            "center": lambda value, width=80: _padded(self.text(value), width),
            "dictsort": lambda value, *_, **__: self.written(value),
            "format": lambda value, *args, **named: self._formatted(
                self.text(value), named or args
            ),
            # What stands for a missing attribute is compared as often as there are items.
            "groupby": lambda value, attribute, default="", *_, **__: (
                len(value) * self._as_text(default)
            ),
            "indent": self._indented,
            "replace": self._replaced,
            "round": self._rounded,
            "slice": lambda value, slices, fill_with=None: slices,
            "tojson": self._as_json,
            "truncate": self._as_text,
        }

    # --- refusing ------------------------------------------------------------------------------

    def check(self, size: int) -> None:
        """Refuse a result of this size if it is too large."""
        if size > self._max_size:
            raise OutOfBounds("makes too long a value")

    def check_operator(self, operator: str, left: Any, right: Any) -> None:
        """Refuse ``left operator right`` if its result would be too large."""
        if operator == "**" and (abs(left) > 2**32 or abs(right) > 64):
            raise OutOfBounds("computes too large a power")
        if operator == "*":
            self._check_product(left, right)
        if operator == "%" and isinstance(left, str):
            self._check_marked(self._formatted(left, right), left, right)
        if operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            self._check_marked(len(left) + len(right), left, right)

    def check_operand(self, value: Any) -> None:
        """Refuse to compare or to hash ``value`` if it is too large.

        What occurs more than once in a collection counts, and takes its time, as often.
        """
        if isinstance(value, Collection) and not isinstance(value, str):
            self.check(self.written(value, str))

    def check_method(
        self, name: str, owner: Any, args: Collection[Any], named: Mapping[str, Any]
    ) -> None:
        """Refuse a call of a method if its result would be too large, or is not known to be small.

        ``owner`` is what the method belongs to.
        """
        if isinstance(owner, type) or (isinstance(owner, int) and name == "to_bytes"):
            raise OutOfBounds(f"may not call {name}")
        if isinstance(owner, str) and name not in _HARMLESS_METHODS:
            if name not in self._methods:
                raise OutOfBounds(f"may not call {name}")
            self.check(self._methods[name](owner, *args, **named))

    def check_filter(self, name: str, args: Collection[Any], named: Mapping[str, Any]) -> None:
        """Refuse a filter if its result would be too large, or is not known to be small.

        The first of ``args`` is the value that is filtered.
        """
        if name not in _HARMLESS_FILTERS:
            if name not in self._filters:
                raise OutOfBounds(f"may not use the filter {name}")
            marked = (*args, *named.values()) if name in _ESCAPING_FILTERS else ()
            self._check_marked(self._filters[name](*args, **named), *marked)

    def check_test(self, name: str, value: Any) -> None:
        """Refuse a test that would make too large a text of ``value``."""
        if name in ("lower", "upper"):
            self.text(value)

    def difference(self, left: Any, right: Any) -> Any:
        """``left - right``; sets would hash what they get."""
        if not isinstance(left, (int, float)) and (isinstance(left, Set) or isinstance(right, Set)):
            raise OutOfBounds("may not subtract sets")
        return left - right

    def text(self, value: Any) -> str:
        """``str(value)``."""
        if not isinstance(value, str):
            self.check(self.written(value))
        return str(value)

    def listed(self, items: Iterable[Any], separator: str = "") -> list[Any]:
        """The items, whose texts are not too large together with the separators between them."""
        known = list(items)
        size = len(separator) * (len(known) - 1)
        for item in known:
            size += self._as_text(item)
            self._check_marked(size, separator)
        return known

    def formatted(
        self,
        environment: SandboxedEnvironment,
        text: str,
        args: tuple[Any, ...],
        named: Mapping[str, Any],
    ) -> str:
        """``text.format(*args, **named)``."""
        if isinstance(text, Markup):
            raise OutOfBounds("may not format a text that is marked as safe")
        return str(_Formatter(environment, self, len(text)).vformat(text, args, named))

    def written(
        self,
        value: Any,
        spell: Callable[[str], str] = repr,
        *,
        per_item: int = 2,
        per_level: int = 0,
    ) -> int:
        """The length of ``repr(value)``, or of JSON, or a length that is too large.

        ``spell`` writes a string. Each item of a list takes ``per_item`` characters more, and
        ``per_level`` for each list around it. What occurs more than once counts as often.
        """
        size = 0
        levels: list[Iterator[Any]] = [iter((value,))]
        while levels and size <= self._max_size:
            item = next(levels[-1], _END)
            if item is _END:
                levels.pop()
            elif isinstance(item, str):
                size += self._spelled(item, spell)
            elif isinstance(item, Collection) and not isinstance(item, range):
                is_plain = isinstance(item, (list, tuple, dict))
                size += len("[\n]" if is_plain else "mappingproxy({})") + per_level * len(levels)
                parts, num_parts = iter(item), len(item)
                if isinstance(item, Mapping):
                    parts, num_parts = itertools.chain.from_iterable(item.items()), 2 * len(item)
                levels.append(parts)
                size += num_parts * (per_item + per_level * len(levels))
            else:
                size += _length_of_other(item)
        return size

    # --- predictions ---------------------------------------------------------------------------

    def field(self, value: Any, kind: str) -> int:
        """The length of ``value`` in a field of a format, without its width and precision."""
        if kind == "s":
            return self._as_text(value)
        if kind in "ra":
            return self.written(value, repr if kind == "r" else ascii)
        if isinstance(value, int):
            # Enough for binary digits with separators, and for six digits and an exponent.
            return 2 * value.bit_length() + 16
        return _MOST_DIGITS_OF_FLOAT

    def _check_marked(self, size: int, *values: Any) -> None:
        """Refuse a result of this size, or of the size that it has with escapes for HTML if any of
        the values is marked as safe."""
        is_marked = any(isinstance(value, Markup) for value in values)
        self.check(size * _ESCAPED if is_marked else size)

    def _check_product(self, left: Any, right: Any) -> None:
        are_numbers = isinstance(left, int) and isinstance(right, int)
        if are_numbers and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise OutOfBounds("computes too large a number")
        for size, times in ((left, right), (right, left)):
            if isinstance(size, _SIZED) and isinstance(times, int):
                self.check(len(size) * times)

    def _formatted(self, text: str, given: Any) -> int:
        size = len(text)
        values = iter(given if isinstance(given, tuple) else (given,))
        for match in _CONVERSION.finditer(text):
            key, width, precision, kind = match.groups()
            if kind is None:
                field = text[match.start() : match.start() + 10]
                raise OutOfBounds(f"may not format the field {field!r}")
            size += int(width or 0) + int(precision or 0)
            if kind != "%":
                size += self.field(next(values, None) if key is None else given[key], kind)
            self.check(size)
        return size

    def _as_text(self, value: Any, *_: Any, **__: Any) -> int:
        return len(value) if isinstance(value, str) else self.written(value)

    def _cased_text(self, value: Any) -> int:
        return _cased(self.text(value))

    def _escaped(self, value: Any) -> int:
        text = self.text(value)
        if isinstance(value, Markup):
            return len(text)
        return len(text) + (_ESCAPED - 1) * sum(map(text.count, "&<>'\""))

    def _replaced(self, value: Any, old: Any, new: Any, count: int | None = None) -> int:
        text, old, new = self.text(value), self.text(old), self.text(new)
        num_found = text.count(old)
        if count is not None and count >= 0:
            num_found = min(num_found, count)
        return len(text) + num_found * (len(new) - len(old))

    def _replaced_in(self, text: str, old: str, new: str, count: int = -1) -> int:
        if not isinstance(text, Markup):
            return self._replaced(text, old, new, count)
        self.check(max(self._escaped(old), self._escaped(new)))
        searched = (old, escape(old))  # the former since markupsafe 3
        return max(self._replaced(text, each, escape(new), count) for each in searched)

    def _indented(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> int:
        text = self.text(value)
        step = len(width) if isinstance(width, str) else max(width, 0)
        return len(text) + (len(text.splitlines()) + 1) * (1 + step)

    def _rounded(self, value: Any, precision: int = 0, method: str = "common") -> int:
        if 4 * abs(precision) > _MAX_BITS:  # Python computes this power of ten
            raise OutOfBounds("computes too large a number")
        return 0

    def _as_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> int:
        step = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
        if step > _MAX_INDENT:
            raise OutOfBounds(f"makes an indent of more than {_MAX_INDENT}")
        return self.written(
            value,
            encode_basestring_ascii if ensure_ascii else encode_basestring,
            per_item=(2 if separators is None else max(map(len, separators))) + 1,
            per_level=step,
        )

    def _spelled(self, text: str, spell: Callable[[str], str]) -> int:
        """The length of ``spell(text)``, in pieces, as that may be much longer than the text."""
        if len(text) <= _PIECE:
            return len(spell(text))
        size = text.count("'") if '"' in text else 0  # which ``repr`` escapes then
        for start in range(0, len(text), _PIECE):
            size += len(spell(text[start : start + _PIECE]))
            if size > self._max_size:
                break
        return size


class _Formatter(SandboxedFormatter):
    """``str.format`` that checks each field with all before it."""

    def __init__(self, environment: SandboxedEnvironment, sizes: Sizes, size: int) -> None:
        """``size`` is that of the text outside fields."""
        super().__init__(environment)
        self._sizes = sizes
        self._size = size

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            self._sizes.check(self._size + self._sizes.field(value, conversion))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        is_number = isinstance(value, (int, float)) and format_spec
        size = self._sizes.field(value, "n" if is_number else "s")
        size += sum(map(int, re.findall(r"\d+", format_spec)))  # its width and precision
        self._sizes.check(self._size + size)
        made = str(super().format_field(value, format_spec))
        self._size += len(made)
        return made


_SIZED: Final = (str, list, tuple)


def _cased(text: str) -> int:
    return len(text) if text.isascii() else _CASED * len(text)


def _padded(text: str, width: int, fillchar: str = " ") -> int:
    return max(len(text), width)


def _expanded(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * max(tabsize, 0)


def _length_of_other(value: Any) -> int:
    """The length of ``str(value)`` for what is neither a string nor a collection."""
    if isinstance(value, Namespace):
        raise OutOfBounds("may not write a namespace")
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise OutOfBounds("makes too long a number")
        return value.bit_length() // 3 + 6  # with a sign, and with quotes as a key of JSON
    return len(repr(value)) + 7  # JSON writes ``Infinity``, with quotes as a key
