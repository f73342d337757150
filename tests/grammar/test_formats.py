"""XGrammar's structural tags: what the masks allow is what each format says, and nothing else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_backend.errors import RequestError
from minisgl_backend.grammar.formats import FORMATS
from minisgl_backend.grammar.matchers import AnswerState, Batch, Grammars, Matcher
from tests.docs.markdown import Page
from tests.grammar.formats import (
    ANY,
    CASES,
    NUMBER,
    OBJECT,
    PARENTHESES,
    THINK,
    F,
    Format,
    const,
    ebnf,
    either,
    regex,
    schema,
    separated,
    sequence,
    some,
    tag,
    triggered,
)
from tests.grammar.matching import (
    EOS,
    VOCABULARY,
    allowed,
    compiled,
    follow,
    walk,
)

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "structured_outputs.md"


def tagged(grammars: Grammars, format: Format) -> Matcher:
    tag = {"type": "structural_tag", "format": format}
    return compiled(grammars, "structural_tag", tag)


@pytest.mark.parametrize("name", CASES)
def test_what_a_format_allows(grammars: Grammars, name: str) -> None:
    format, right, wrong = CASES[name]
    for texts, is_right in ((right, True), (wrong, False)):
        for text in texts:
            assert follow(grammars, tagged(grammars, format), text) == is_right, text


@pytest.mark.parametrize("name", CASES)
def test_a_format_may_stand_inside_another_one(grammars: Grammars, name: str) -> None:
    format, right, wrong = CASES[name]
    outer = sequence(const("<begin>\n"), format, const("<|"))
    if "any text" in name or "triggered" in name or "dispatch" in name:
        outer = tag("<begin>\n", format, "<|")
    for text in right:
        assert follow(grammars, tagged(grammars, outer), f"<begin>\n{text}<|"), text
        assert not follow(grammars, tagged(grammars, outer), text)
    for text in wrong:
        assert not follow(grammars, tagged(grammars, outer), f"<begin>\n{text}<|"), text


def test_tokens_may_straddle_the_borders_of_formats(grammars: Grammars) -> None:
    """The text is followed in many ways; in some, a token has the end of one format and the
    beginning of the next."""
    parts = ["<think>", "I look ", "it up", "</think>", "and then ", '{"', 'at": 1}', "the", "re"]
    format = sequence(
        tag("<think>", sequence(regex("I look "), ANY), "</think>"),
        either(const("and then "), const("or")),
        OBJECT,
        const("the"),
        some("optional", const("re")),
    )
    borders = {len("".join(parts[:count]).encode()) for count in range(1, len(parts))}
    chance = random.Random(0)
    straddled = set()
    for _ in range(20):
        matcher, at, rest = tagged(grammars, format), 0, "".join(parts).encode()
        while rest:
            pieces = {token: VOCABULARY.pieces[token] for token in allowed(grammars, matcher)}
            options = [token for token, piece in pieces.items() if piece and rest.startswith(piece)]
            token = chance.choice(options)
            size = len(pieces[token])
            straddled |= {border for border in borders if at < border < at + size}
            at, rest = at + size, rest[size:]
            grammars.advance(Batch([matcher]), [token])
        assert matcher.inner.is_stopped() or EOS in allowed(grammars, matcher)
    assert len(straddled) > 2


def is_json(text: str) -> bool:
    json.loads(text)
    return True


def is_tagged(text: str) -> bool:
    """Free text in which each trigger begins a tag."""
    _, *calls = text.split("<f")
    return all(re.match(r"=a>-?\d+</f>", call) for call in calls)


def matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def is_thought_and_json(text: str) -> bool:
    found = re.fullmatch(r"<t>((?!</t>).)*</t>(.*)", text, re.DOTALL)
    return found is not None and is_json(found[2])


WALKS: Final[list[tuple[Format, Callable[[str], bool]]]] = [
    (
        sequence(tag("<t>", {**ANY, "max_chars": 5}, "</t>"), schema({"type": "boolean"})),
        is_thought_and_json,
    ),
    (triggered(F, triggers=["<f"]), is_tagged),
    (
        separated(F, tag("[", regex("[ab]{1,3}"), "]"), separator=", ", at_least_one=True),
        matches(r"(<f=a>-?\d+</f>|\[[ab]{1,3}\])(, (<f=a>-?\d+</f>|\[[ab]{1,3}\]))*"),
    ),
    (
        some("repeat", either(const("ab"), ebnf("root ::= [0-9]+")), min=2, max=3),
        matches(r"(ab|[0-9]+){2,3}"),
    ),
    (
        sequence({**ANY, "excludes": ["a", "\n"], "max_chars": 5}, const("an"), NUMBER),
        matches(r"[^a\n]{0,5}an-?\d+"),
    ),
    (
        schema({"properties": {"a": {"type": "boolean"}}, "required": ["a"]}, style="qwen_xml"),
        matches(r"\s*<parameter=a>\s*(true|false)\s*</parameter>\s*"),
    ),
]


@pytest.mark.parametrize("index", range(len(WALKS)))
def test_answers_that_end_have_the_format(grammars: Grammars, index: int) -> None:
    format, is_right = WALKS[index]
    texts = [walk(grammars, tagged(grammars, format), random.Random(seed)) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert ended
    assert [text for text in ended if not is_right(text)] == []


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (tag("<", NUMBER, ">"), "<12>"),
        (sequence(OBJECT, const("!")), "{}!"),
        (THINK, "<think>a</think>"),
        (some("repeat", const("ab"), min=0, max=2), "abab"),
        (triggered(F, triggers=["<f"], stop_after_first=True), "a<f=a>1</f>"),
    ],
)
def test_an_answer_ends_where_its_format_does(
    grammars: Grammars, format: Format, text: str
) -> None:
    matcher = tagged(grammars, format)
    rest = text.encode()
    while rest:
        options = [t for t in allowed(grammars, matcher) if VOCABULARY.pieces[t]]
        token = next(t for t in options if rest.startswith(VOCABULARY.pieces[t]))
        rest = rest[len(VOCABULARY.pieces[token]) :]
        states = grammars.advance(Batch([matcher]), [token])
        assert states == ({} if rest else {0: AnswerState.COMPLETE})


START, END = (VOCABULARY.names.index(name) for name in ("<|im_start|>", "<|im_end|>"))


def of_tokens(*kinds: Any) -> list[int]:
    """The ids of special tokens, and the bytes of texts as tokens."""
    found: list[int] = []
    for kind in kinds:
        if isinstance(kind, int):
            found.append(kind)
        else:
            found += [VOCABULARY.pieces.index(bytes([byte])) for byte in kind.encode()]
    return found


def takes(grammars: Grammars, format: Format, *kinds: Any) -> bool:
    """Whether these tokens are a complete answer."""
    matcher = tagged(grammars, format)
    matcher.inner.consume_tokens(tokens := of_tokens(*kinds))
    assert tokens
    return not matcher.inner.is_error() and matcher.inner.is_accepting()


_TOKEN: Final = {"type": "token", "token": "<|im_start|>"}


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        (
            tag("<|im_start|>f", ANY, ["<|im_end|>", "."]),
            [(START, "fa", END), (START, "f.")],
            [
                ("<|im_start|>f.",),
                (START, "f", START, END),
                (START, "f", END, "a"),
                (START, "f<|im_end|>", END),
            ],
        ),
        (
            tag(_TOKEN, NUMBER, {"type": "token", "token": END}),
            [(START, "12", END)],
            [(START, "12"), (START, "12<|im_end|>")],
        ),
        (const("a<|im_start|>b"), [("a", START, "b")], [("a<|im_start|>b",)]),
        (sequence(ANY, _TOKEN, ANY), [(START,), ("ab", START, "c")], [("ab",), (START, START)]),
        (
            triggered(tag("<|im_start|>f", NUMBER, "<|im_end|>"), triggers=["<|im_start|>"]),
            [("a", START, "f1", END, "b"), ("<|im_start",)],
            [(START, "g"), (END,), ("<|im_start|>f1",)],
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": [START],
                "exclude_tokens": ["<|im_end|>"],
                "tags": [tag(_TOKEN, {"type": "any_tokens"}, {"type": "token", "token": END})],
            },
            [("a", START, "b", END, "c", START, END)],
            [(START, "a"), (END,)],
        ),
        (
            {"type": "token_dispatch", "rules": [["<|im_start|>", const("a")]], "loop": False},
            [("b", START, "a"), ("b",)],
            [(START, "b"), (START, "aa")],
        ),
    ],
)
def test_special_tokens_in_formats(
    grammars: Grammars, format: Format, right: list[tuple[Any]], wrong: list[tuple[Any]]
) -> None:
    assert [one for one in right if not takes(grammars, format, *one)] == []
    assert [one for one in wrong if takes(grammars, format, *one)] == []


def test_the_document_has_all_formats_and_its_examples_are_taken(grammars: Grammars) -> None:
    text = DOCUMENT.read_text("utf-8")
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+)\|", text.partition("## Formats")[2], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows[1:]))) == set(FORMATS)
    examples = [block.text for block in Page(DOCUMENT).blocks if block.language == "json"]
    assert len(examples) == 3
    for example in examples:
        assert follow(grammars, compiled(grammars, "structural_tag", example), "") == (
            "format" not in example
        )


def test_many_tools_in_one_format(grammars: Grammars) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tags = [tag(f"<f={index}>", schema(parameters), "</f>") for index in range(200)]
    format = triggered(*tags, triggers=["<f="])
    assert follow(grammars, tagged(grammars, format), 'a<f=120>{"a": 1}</f>b')
    assert not follow(grammars, tagged(grammars, format), "<f=200>")


_NO_END: Final = "can go on with what may follow it: where it ends cannot be told$"


@pytest.mark.parametrize(
    ("format", "complaint"),
    [
        ({"type": "what"}, 'format.type must be one of const_string, .*, got "what"'),
        ({}, "format.type must be one of .*, got null"),
        ("any_text", "^structural_tag: format must be an object"),
        (sequence(), r"format.elements must be a list, not empty"),
        (sequence(ANY, {"type": "exclude_token"}), r"format.elements\[1\].type must be one of"),
        (tag("<", either(const("a"), regex("(")), ">"), "at #/format/content/elements/1/pattern"),
        (sequence(regex("\\")), r"format.elements\[0\].pattern must be a regular expression"),
        (const(1), "format.value must be a string"),  # type: ignore[arg-type]
        ({**ANY, "max_tokens": 0}, "format.max_tokens is not supported"),
        ({**ANY, "excludes": [""]}, r"format.excludes\[0\] must be a string, not empty"),
        ({**ANY, "max_chars": -1}, "format.max_chars must be an integer from 0"),
        ({**ANY, "min_chars": 1}, "format.min_chars of a structural tag is not supported"),
        (schema({"not": {}}), "not is not supported, at #/format/json_schema/not"),
        (schema(False), "format.json_schema must be a JSON schema that some value follows"),
        (schema({}, style="gemma"), "format.style must be one of json, qwen_xml, .*, got gemma"),
        (schema({}, any_order=True), "format.any_order is not supported"),
        (schema({"type": "array"}, style="qwen_xml"), "must be the schema of an object"),
        (
            schema({"properties": {"a": {"type": "string", "pattern": "x"}}}, style="qwen_xml"),
            r"pattern .* is not supported, at format.json_schema.properties.a$",
        ),
        *(
            (schema(wrong, style="qwen_xml"), f"format.json_schema.{told}")
            for wrong, told in (
                ({"properties": []}, "properties must be an object"),
                ({"required": [["a"]]}, "required must be a list of properties"),
                ({"properties": {"a": {"type": 3}}}, "properties.a must have one type"),
                ({"properties": {"a": {"anyOf": []}}}, "properties.a.anyOf must be a list, not"),
                (
                    {"properties": {"a": {"enum": []}}},
                    "properties.a.enum must be a list, not empty",
                ),
                ({"properties": {"a": False}}, "properties.a must be a JSON schema that some"),
                ({"properties": {"a": {"$ref": "#/b"}}}, "properties.a must be a JSON schema that"),
                (
                    {"properties": {"a": {"type": "string", "maxLength": "b"}}},
                    "properties.a.maxLength must be an integer from 0",
                ),
                (
                    {"properties": {"a": {"const": "</parameter>"}}},
                    "properties.a must not list a text with </parameter>",
                ),
            )
        ),
        (ebnf("root ::= ("), "grammar is wrong: .*, at format.grammar"),
        (ebnf("start: X"), "format.grammar must be a grammar with a rule root"),
        (ebnf('root ::= "a" other'), "'other' not found, at format.grammar"),
        (some("repeat", ANY, min=2, max=1), "format.max must be at least min, or -1"),
        (some("repeat", ANY, min=1), "format.max must be given"),
        (some("repeat", ANY, min=True, max=1), "format.min must be an integer from 0"),
        (some("star", ANY, min=1), "format.min of a structural tag is not supported"),
        (some("star", 1), "format.content must be an object"),  # type: ignore[arg-type]
        (tag("<", ANY, []), "format.end must be a string, or a list of strings, not empty"),
        (tag({"type": "any_text"}, ANY, ">"), "format.begin.type must be token"),
        (tag({"type": "token", "token": 600}, ANY, ">"), "begin.token must be a special token"),
        ({"type": "any_tokens", "exclude_tokens": ["a"]}, r"exclude_tokens\[0\] must be a special"),
        (triggered(F, triggers=["<g"]), r"format.tags\[0\].begin must be begun by a trigger"),
        (triggered(F, triggers=["<f", "<g"]), r"format.triggers\[1\] must be the beginning of"),
        (triggered(F, triggers=[""]), r"format.triggers\[0\] must be a string, not empty"),
        (triggered(const("a"), triggers=["a"]), r"format.tags\[0\].type must be tag"),
        (triggered(F, triggers=["<f"], at_least_one=1), "format.at_least_one must be true or"),
        ({"type": "dispatch", "rules": [["a"]]}, r"format.rules\[0\] must be a pattern and a"),
        (sequence(ANY, OBJECT), rf"format.elements\[0\] {_NO_END}"),
        (sequence(regex(".*: "), schema(True)), rf"format.elements\[0\] {_NO_END}"),
        (sequence(regex("a*"), PARENTHESES), rf"format.elements\[0\] {_NO_END}"),
        (
            sequence(ANY, some("star", tag("[", some("optional", OBJECT), "]"))),
            rf"format.elements\[0\] {_NO_END}",
        ),
        (some("star", sequence(OBJECT, ANY)), "where what it repeats ends cannot be told"),
        (sequence(NUMBER, const("5")), r"format.elements\[0\] may be a number, and what follows"),
        (sequence(NUMBER, either(const("5"), sequence(NUMBER, ANY))), "may be a number"),
        (sequence(regex("[a-z]+"), schema({"enum": [True]})), rf"format.elements\[0\] {_NO_END}"),
        (sequence(NUMBER, schema({"enum": [1, 2]})), r"format.elements\[0\] may be a number"),
        (sequence(schema(True), regex("[eE]nd")), r"format.elements\[0\] may be a number"),
    ],
)
def test_a_format_that_cannot_be_followed_is_refused_with_its_place(
    grammars: Grammars, format: Any, complaint: str
) -> None:
    with pytest.raises(RequestError, match=complaint) as caught:
        tagged(grammars, format)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "format",
    [
        ebnf(
            "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40))
            + '\nr40 ::= "a"\nroot ::= r0'
        ),
        json.loads('{"type": "star", "content": ' * 200 + json.dumps(ANY) + "}" * 200),
    ],
)
def test_a_format_that_is_too_large_fails_alone(grammars: Grammars, format: Format) -> None:
    with pytest.raises(RequestError):
        tagged(grammars, format)
    assert follow(grammars, tagged(grammars, const("ok")), "ok")
