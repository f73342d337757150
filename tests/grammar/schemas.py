"""JSON schemas for tests: ``closed`` ones by hand, and all kinds made by Hypothesis: nested,
recursive, with bounds, patterns and references."""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

_NAMES: Final = st.sampled_from(["a", "b", "name", "größe", "名前", "x y", 'q"uote'])
_PATTERNS: Final = ["^[a-z]{1,5}$", "^(ab|cd)+$", r"^\d{2}-\d{2}$", "^[^x]{0,4}$", "^ä?ö$"]


def closed(**properties: Any) -> dict[str, Any]:
    """An object that has all of these properties, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _numbers(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    low = st.integers(-50, 50)
    return st.fixed_dictionaries(
        {"type": st.just(kind)},
        optional={"minimum": low, "maximum": low.map(lambda value: value + 100)},
    )


_STRINGS: Final = st.one_of(
    st.just({"type": "string"}),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
)
_LEAVES: Final = st.one_of(
    _numbers("integer"),
    _numbers("number"),
    _STRINGS,
    st.sampled_from(["boolean", "null"]).map(lambda kind: {"type": kind}),
    st.lists(
        st.one_of(st.integers(-5, 5), st.text(max_size=4), st.booleans(), st.none()),
        min_size=1,
        max_size=4,
    ).map(lambda values: {"enum": values}),
    st.text(max_size=6).map(lambda value: {"const": value}),
    st.just({"type": ["string", "null"], "maxLength": 3}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def made(draw: st.DrawFn) -> dict[str, Any]:
        properties = draw(st.dictionaries(_NAMES, inner, min_size=1, max_size=3))
        required = [name for name in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return made()


def _arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda items, low, more: {
            "type": "array",
            "items": items,
            "minItems": low,
            "maxItems": low + more,
        },
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )


def _inner(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        _objects(inner),
        _arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    )


_PLAIN: Final = st.recursive(_LEAVES, _inner, max_leaves=6)


@st.composite
def _with_references(draw: st.DrawFn) -> dict[str, Any]:
    """A list of pairs that refers to itself, and a definition that is used twice."""
    return {
        "$defs": {
            "item": draw(_LEAVES),
            "pair": {
                "type": "object",
                "properties": {
                    "first": {"$ref": "#/$defs/item"},
                    "rest": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
                },
                "required": ["first", "rest"],
                "additionalProperties": False,
            },
        },
        "$ref": "#/$defs/pair",
    }


SCHEMAS: Final = st.one_of(_PLAIN, _with_references())
"""Each has valid values, some of them short."""
