"""Grammars that no client should send: deep, huge, recursive, ambiguous, catastrophic, broken.

Each is a value of ``structured_outputs``. Many are valid, and answers may follow them. Must not
know how they are sent or judged.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any, Final, TypeAlias

Form: TypeAlias = dict[str, Any]
"""``{"json": schema}`` and the like."""


def hostile_grammar(rng: random.Random) -> tuple[str, Form]:
    """A grammar, and what is odd about it."""
    make = rng.choice(_MAKERS)
    return make.__name__.removeprefix("_").replace("_", " "), make(rng)


def _size(rng: random.Random, most: int) -> int:
    """A size; small and large ones are equally likely."""
    return int(most ** rng.random())


def _schema(rng: random.Random, depth: int = 3) -> Any:
    """A random schema that is mostly valid."""
    kind = rng.randrange(9 if depth else 5)
    if kind == 0:
        return {"type": "integer", "minimum": rng.randrange(-999, 999)}
    if kind == 1:
        return {"type": "string", "maxLength": _size(rng, 10**6)}
    if kind == 2:
        return {"enum": [rng.random() for _ in range(_size(rng, 300))]}
    if kind == 3:
        return {"type": "string", "pattern": _expression(rng)}
    if kind == 4:
        return {"type": rng.choice(["null", "boolean", "number", "object", "array", "what"])}
    inner = [_schema(rng, depth - 1) for _ in range(rng.randint(1, 4))]
    if kind == 5:
        return {"type": "object", "properties": {_word(rng): one for one in inner}}
    if kind == 6:
        return {rng.choice(["anyOf", "allOf", "oneOf"]): inner}
    if kind == 7:
        items = {"items": inner[0], "minItems": _size(rng, 10**5)}
        return {"type": "array", **items}
    return {"prefixItems": inner, "items": rng.choice([True, False, inner[0]])}


def _word(rng: random.Random) -> str:
    return "".join(rng.choices('abcä日"\\\n💥 ', k=rng.randint(1, 12)))


def _expression(rng: random.Random) -> str:
    """A random expression, now and then a broken one."""
    parts = [
        "a", ".", r"\d", r"\w", "[^x]", "(a+)+", "(a|a)*", "(.*a){9}", "(a?){20}a{20}", "x{1,999}",
        "日", r"\p{L}", "(", ")", "*", "^", "$", "|", "(?=a)", r"\1", "(?i:k)", "[a-z]{0,200}",
        ".{5000}", "((a{1,60}){1,60}){1,60}", r"[\s\S]*",
    ]  # fmt: skip
    return "".join(rng.choices(parts, k=_size(rng, 60)))


def _nested_schema(rng: random.Random) -> Form:
    depth = _size(rng, 5000)
    opening = rng.choice(['{"items":', '{"properties":{"a":', '{"anyOf":[', '{"not":', "["])
    closing = {'{"items":': "}", '{"properties":{"a":': "}}", '{"anyOf":[': "]}", '{"not":': "}"}
    return {"json": opening * depth + "{}" + closing.get(opening, "]") * depth}


def _schema_of_many_fields(rng: random.Random) -> Form:
    names = [f"{_word(rng)}{index}" for index in range(_size(rng, 4000))]
    schema: Form = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
    if rng.random() < 0.5:
        schema["required"] = names
    return {"json": schema}


def _schema_of_references(rng: random.Random) -> Form:
    count = _size(rng, 600)
    definitions = {
        f"d{index}": {
            rng.choice(["anyOf", "allOf", "prefixItems"]): [
                {"$ref": f"#/$defs/d{rng.randrange(count + 1)}"} for _ in range(rng.randint(1, 5))
            ]
        }
        for index in range(count)
    }
    return {"json": {"$defs": definitions, "$ref": "#/$defs/d0"}}


def _schema_that_multiplies(rng: random.Random) -> Form:
    width, height = rng.randint(2, 5), rng.randint(2, 30)
    options = [
        {"anyOf": [{"properties": {f"{a}{b}": {"const": a}}} for a in range(width)]}
        for b in range(height)
    ]
    return {"json": {rng.choice(["allOf", "anyOf", "oneOf"]): options}}


def _schema_of_far_bounds(rng: random.Random) -> Form:
    far = rng.choice([1e308, -1e308, 1e-300, 2**64, 10**40, 0, -1, 0.1])
    keys = ["minimum", "maximum", "multipleOf", "exclusiveMinimum", "minLength", "maxItems"]
    keys = rng.sample(keys, rng.randint(1, 4))
    return {"json": {"type": rng.choice(["number", "integer"]), **dict.fromkeys(keys, far)}}


def _random_schema(rng: random.Random) -> Form:
    return {"json": _schema(rng, rng.randint(0, 6))}


def _schema_cut_or_changed(rng: random.Random) -> Form:
    text = json.dumps(_schema(rng, 4))
    at = rng.randrange(len(text))
    rest = text[at + 1 :] if rng.random() < 0.5 else ""
    return {"json": text[:at] + rng.choice(["", '"', "{", "]", "1e999", "\\ud800"]) + rest}


def _random_expression(rng: random.Random) -> Form:
    return {"regex": _expression(rng)}


def _expression_of_many_states(rng: random.Random) -> Form:
    most = _size(rng, 3000)
    shapes = [
        "(.*{c}.{{1,{n}}}){{20}}", "({c}{{1,{n}}}){{1,{n}}}", ".*{c}.{{{n}}}", "[{c}-z]{{{n}}}",
        "((({c}+)+)+)+{{{n}}}", "(({c}|b|c){{{n}}}|x)*",
    ]  # fmt: skip
    return {"regex": rng.choice(shapes).format(c=rng.choice(string.ascii_lowercase), n=most)}


def _chain_of_rules(rng: random.Random) -> Form:
    count = _size(rng, 9000)
    rules = "\n".join(f'r{n}: "x" r{n + 1} | r{rng.randrange(count)}' for n in range(count))
    return {"grammar": f'start: r0\n{rules}\nr{count}: "y"'}


def _ambiguous_rules(rng: random.Random) -> Form:
    body = rng.choice(
        [
            'start | start start | ""', "start start start | A", "a a a\na: b b b\nb: a | A",
            "(A? A? A?)*", "((A*)*)*", '"" start ""', "start", "A | start A | A start",
        ]
    )  # fmt: skip
    return {"grammar": f"start: {body}\nA: /a{{0,{_size(rng, 999)}}}/ | /.*/"}


def _random_rules(rng: random.Random) -> Form:
    words = [
        "start", ":", "::=", "root", '"a"', "/b+/", "(", ")", "|", "*", "+", "\n", "{1,999}", "~",
        "%json", "{}", "%ignore", "/ /", "A", "[lazy]", "%llguidance {}", "&", "<[5]>", "<[99999]>",
        "[^", "]", "//", "%regex", "suffix",
    ]  # fmt: skip
    return {"grammar": " ".join(rng.choices(words, k=_size(rng, 200)))}


def _many_choices(rng: random.Random) -> Form:
    count, length = _size(rng, 5000), _size(rng, 40)
    words = ["".join(rng.choices("ab", k=length)) for _ in range(count)]
    return {"choice": words + rng.choice([[], [""], [1], ["\ud800"], ["x" * 10_000]])}


def _tags(rng: random.Random) -> Form:
    triggers = ["<" * rng.randint(0, 3) + _word(rng) for _ in range(_size(rng, 60))]
    structures = [
        {"begin": rng.choice(triggers) + _word(rng), "schema": _schema(rng, 2), "end": _word(rng)}
        for _ in range(_size(rng, 60))
    ]
    flags = {name: rng.random() < 0.5 for name in ("at_least_one", "stop_after_first")}
    return {"structural_tag": {"structures": structures, "triggers": triggers, **flags}}


def _formats(rng: random.Random) -> Form:
    return {"structural_tag": {"format": _format(rng, rng.randint(0, 6))}}


def _format(rng: random.Random, depth: int) -> Any:
    """A format of XGrammar's, with now and then a field that is wrong."""
    texts = [_word(rng), "<" + _word(rng), "", "</" + _word(rng)]
    inner = [_format(rng, depth - 1) for _ in range(rng.randint(1, 3))] if depth > 0 else []
    content = inner[0] if inner else {"type": "any_text"}
    tag = {"type": "tag", "begin": rng.choice(texts), "content": content, "end": texts[3]}
    made: dict[str, Any] = rng.choice(
        [
            {"type": "const_string", "value": rng.choice(texts)},
            {"type": "any_text", "excludes": texts[:2], "max_chars": rng.choice([None, 0, 2**31])},
            {"type": "regex", "pattern": rng.choice([_word(rng), "(a|b*){1,99}", "[^a]*a", "\\"])},
            {"type": "grammar", "grammar": rng.choice(['root ::= "a" root | [b-]*', _word(rng)])},
            {"type": "json_schema", "json_schema": _schema(rng, 2), "style": rng.choice(_STYLES)},
            {"type": rng.choice(["sequence", "or"]), "elements": inner},
            {"type": rng.choice(["optional", "star", "plus"]), "content": content},
            {"type": "repeat", "content": content, "min": 2, "max": rng.choice([-1, 1, 10**6])},
            tag,
            {"type": "triggered_tags", "triggers": [tag["begin"][:2]], "tags": [tag]},
            {"type": "tags_with_separator", "separator": texts[0], "tags": [tag, tag]},
            {"type": "dispatch", "rules": [[texts[1], content]], "loop": rng.random() < 0.5},
        ]
    )
    if rng.random() < 0.05:
        made[rng.choice([*made])] = rng.choice([None, 1, "", [], {}, [[]], True, {"type": "token"}])
    return made


_STYLES: Final = ("json", "json", "qwen_xml", "glm_xml", "deepseek_xml")
_MAKERS: Final[tuple[Callable[[random.Random], Form], ...]] = (
    _nested_schema,
    _schema_of_many_fields,
    _schema_of_references,
    _schema_that_multiplies,
    _schema_of_far_bounds,
    _random_schema,
    _schema_cut_or_changed,
    _random_expression,
    _expression_of_many_states,
    _chain_of_rules,
    _ambiguous_rules,
    _random_rules,
    _many_choices,
    _tags,
    _formats,
)
