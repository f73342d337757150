"""What a dialect's constraint allows, its reader reads as the intended calls.

Texts are drawn at random from the tokens that the engine's masks allow, over the demo model's
vocabulary, and once more with tokens for the marks of calls.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, get_args

import jsonschema
import numpy as np
import pytest
from minisgl_client.answer import ChatFormat, Delta
from minisgl_client.answer import ToolDialect as ToldDialect
from minisgl_gateway.body import parse
from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.chat import Chat
from minisgl_gateway.completions.schema import ChatCompletionRequest
from minisgl_gateway.completions.translation import chat_of
from minisgl_gateway.dialects.base import Dialect
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.generation import Policy
from minisgl_gateway.template import Template
from minisgl_gateway.tools import Calls, Tool

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.grammar.matchers import AnswerState, Batch, Grammars
from minisgl_backend.text.chat_format import ToolDialect
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.messages import join_parts
from minisgl_backend.text.template import ChatTemplate
from minisgl_backend.text.tokenizer_files import load_definition, load_vocabulary
from minisgl_backend.text.vocabulary import Vocabulary
from tests.fakes import chat_templates
from tests.grammar.matching import compiled

EOS: Final = 0
MARKS: Final = (
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<TOOLCALL>", "</TOOLCALL>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)
MOST_TOKENS: Final = 400


def shown(name: Any, *marks: str) -> ChatFormat:
    return ChatFormat(name, frozenset(marks), None, False, frozenset())


CITY: Final = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bogotá", 'say "hi"', "a\\b", "</tool_call>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TREE: Final = {
    "type": "object",
    "properties": {"tree": {"$ref": "#/$defs/node"}, "properties": {"const": "$ref"}},
    "required": ["tree"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "is": {"type": "boolean"}},
            "required": ["is"],
            "additionalProperties": False,
        }
    },
}
STRICT: Final = (
    Tool("weather", parameters=CITY, strict=True),
    Tool("tree", parameters=TREE, strict=True),
)
NAMES: Final = (
    Tool('a "quoted" name', parameters=CITY, strict=True),
    Tool("näme\\[1]{2}", parameters=CITY, strict=True),
)
MIXED: Final = (*STRICT, Tool("now"), Tool("note", parameters=CITY))

DIALECTS: Final = {
    "hermes": dialect_of(shown("hermes")),
    "qwen_xml": dialect_of(shown("qwen_xml")),
    "glm": dialect_of(shown("glm")),
    "minimax": dialect_of(shown("minimax")),
    "seed": dialect_of(shown("seed")),
    "gemma4": dialect_of(shown("gemma4")),
    "llama3_json": dialect_of(shown("llama3_json")),
    "mistral": dialect_of(shown("mistral")),
    "mistral newer": dialect_of(shown("mistral", "[ARGS]")),
    "nemotron": dialect_of(shown("nemotron")),
    "lfm2": dialect_of(shown("lfm2")),
    "command": dialect_of(shown("command")),
    "plain": dialect_of(None),
}


@dataclass(frozen=True)
class Engine:
    """The masks of an engine, and the text of its tokens, some of which are ``marks``."""

    grammars: Grammars
    vocabulary: Vocabulary
    marks: tuple[bytes, ...]

    def say(self, tag: Any, chance: random.Random, likes: str = "") -> str | None:
        """A text of random allowed tokens, preferably beginning with ``likes``; None if it does not
        end."""
        matcher = compiled(self.grammars, "structural_tag", tag)
        tokens: list[int] = []
        pieces = self.vocabulary.spelled_pieces
        liked = likes.encode()
        for _ in range(MOST_TOKENS):
            options = self._allowed(matcher)
            assert options, "nothing may follow, though the answer is not complete"
            first = self._up_to_mark(liked)
            wanted = [t for t in options if t != EOS and liked and first.startswith(pieces[t])]
            if wanted:
                token = max(wanted, key=lambda option: len(pieces[option]))
                liked = liked[len(pieces[token]) :]
            elif EOS in options and chance.random() < 0.3:
                token = EOS
            else:
                ends = [t for t in options if pieces[t][:1] in (b'"', b"}", b"]", b"<")]
                few = ends if ends and chance.random() < 0.4 else options
                token = min(chance.choices(few, k=4), key=lambda option: len(pieces[option]))
            if token != EOS:
                tokens.append(token)
            ended = self.grammars.advance(Batch([matcher]), [token])
            assert AnswerState.BROKEN not in ended.values()
            if ended:
                stream = TextStream(self.vocabulary, skip_special_tokens=False)
                return stream.push(tokens, final=True).text
        return None

    def allows(self, tag: Any, text: str) -> bool:
        """Whether a text, in the longest allowed tokens, follows the tag to an end."""
        matcher = compiled(self.grammars, "structural_tag", tag)
        pieces = self.vocabulary.spelled_pieces
        rest = text.encode()
        while rest:
            options = self._allowed(matcher)
            first = self._up_to_mark(rest)
            fitting = [t for t in options if pieces[t] and first.startswith(pieces[t])]
            if not fitting:
                return False
            token = max(fitting, key=lambda option: len(pieces[option]))
            rest = rest[len(pieces[token]) :]
            self.grammars.advance(Batch([matcher]), [token])
        return EOS in self._allowed(matcher)

    def _up_to_mark(self, text: bytes) -> bytes:
        """A text up to the next mark behind its beginning: other tokens do not go over its edge."""
        return text[: min((at for at in map(text.find, self.marks) if at > 0), default=None)]

    def _allowed(self, matcher: Any) -> list[int]:
        masks = np.empty((1, self.grammars.num_words), np.int32)
        assert self.grammars.fill(Batch([matcher]), masks).result() == {}
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        tokens: list[int] = np.flatnonzero(bits[: len(self.vocabulary)]).tolist()
        return tokens


@pytest.fixture(scope="module", params=["texts", "tokens", "special tokens"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """The marks are texts, or tokens of the vocabulary, or special ones."""
    marks = () if request.param == "texts" else MARKS
    folder = chat_templates.demo_model(
        tmp_path_factory.mktemp("model") / "model",
        "",
        marks,
        special=request.param == "special tokens",
    )
    vocabulary = load_vocabulary(folder)
    grammars = Grammars(
        partial(load_definition, folder), vocab_size=len(vocabulary), eos_token_ids=(EOS,)
    )
    yield Engine(grammars, vocabulary, tuple(mark.encode() for mark in marks))
    grammars.close()


def read(dialect: Dialect, text: str, tools: tuple[Tool, ...] = ()) -> tuple[str, list[CalledTool]]:
    """The text around calls, and the calls."""
    reader = dialect.reader(tools)
    parts = reader.push(text) + reader.finish()
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts), [part for part in parts if isinstance(part, CalledTool)]


def check(calls: list[CalledTool], tools: tuple[Tool, ...], *, enforced: bool) -> None:
    """Each call is of one of the tools, with arguments that fit its schema."""
    by_name = {tool.name: tool for tool in tools}
    for call in calls:
        tool = by_name[call.name]
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if enforced or tool.strict:
            nothing: Any = {"maxProperties": 0}
            jsonschema.Draft202012Validator(tool.parameters or nothing).validate(arguments)


@pytest.mark.parametrize("tools", [STRICT, NAMES, MIXED], ids=["strict", "names", "mixed"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_of_required_calls_is_nothing_but_calls(
    engine: Engine, name: str, parallel: bool, tools: tuple[Tool, ...]
) -> None:
    calls_wanted = Calls(required=True, parallel=parallel)
    dialect = DIALECTS[name].enforcing(tools, calls_wanted)
    tag = dialect.constraint(tools, calls_wanted)
    told = set()
    for seed in range(8):
        text = engine.say(tag, random.Random(seed))
        if text is None:
            continue
        rest, calls = read(dialect, text, tools)
        assert not rest and calls and (parallel or len(calls) == 1), text
        check(calls, tools, enforced=True)
        told |= {call.name for call in calls}
    assert len(told) > 1


@pytest.mark.parametrize("name", DIALECTS)
def test_a_named_tool_is_called_once(engine: Engine, name: str) -> None:
    tools = (*MIXED, *NAMES)
    for tool in tools:
        dialect = DIALECTS[name].enforcing(tools, Calls.of(tool.name))
        tag = dialect.constraint(tools, Calls.of(tool.name))
        texts = [engine.say(tag, random.Random(seed)) for seed in range(4)]
        found = [read(dialect, text, tools) for text in texts if text is not None]
        assert found
        for rest, (call,) in found:
            assert not rest and call.name == tool.name
            check([call], tools, enforced=True)


BEGUN: Final = {
    "hermes": "Let me see. <tool_call>",
    "qwen_xml": "Let me see. <tool_call>",
    "glm": "Let me see. <tool_call>",
    "minimax": "Let me see. <minimax:tool_call>",
    "seed": "Let me see. <seed:tool_call>",
    "gemma4": "Let me see. <|tool_call>",
    "plain": "Let me see. <tool_call>",
    "nemotron": "Let me see. <TOOLCALL>",
    "lfm2": "Let me see. <|tool_call_start|>",
    "command": "Let me see. <|START_ACTION|>",
    "llama3_json": 'Let me see. {"name"',
    "mistral": "Let me see. [TOOL_CALLS]",
    "mistral newer": "Let me see. [TOOL_CALLS]",
}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", DIALECTS)
def test_strict_tools_leave_the_text_free(engine: Engine, name: str, parallel: bool) -> None:
    dialect = DIALECTS[name]
    tag = dialect.constraint(MIXED, Calls(parallel=parallel))
    assert engine.say(tag, random.Random(0), "{ I have [no] <tool> }") is not None
    num_calls = 0
    for seed in range(6):
        text = engine.say(tag, random.Random(seed), BEGUN[name])
        if text is None:
            continue
        rest, calls = read(dialect, text, MIXED)
        assert rest.startswith("Let me see.") and calls and (parallel or len(calls) == 1), text
        assert parallel or rest == "Let me see."
        check(calls, MIXED, enforced=False)
        num_calls += len(calls)
    assert num_calls > 2


@pytest.mark.parametrize("opening", ['<|python_tag|>{"name"', '{"type": "function"'])
def test_no_call_of_a_llama_gets_around_its_schema(engine: Engine, opening: str) -> None:
    dialect = DIALECTS["llama3_json"]
    tag = dialect.constraint(STRICT, Calls())
    texts = [engine.say(tag, random.Random(seed), f"So: {opening}") for seed in range(8)]
    found = [read(dialect, text) for text in texts if text is not None and opening in text]
    assert found
    for rest, calls in found:
        assert rest.startswith("So:") and calls
        check(calls, STRICT, enforced=True)


def test_what_cannot_be_enforced_is_left_out_for_tools_that_are_not_strict(engine: Engine) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    loose, strict = [Tool("odd", parameters=odd)], [Tool("odd", parameters=odd, strict=True)]
    for dialect in DIALECTS.values():
        tag = dialect.enforcing(loose, Calls.of("odd")).constraint(loose, Calls.of("odd"))
        assert engine.say(tag, random.Random(0)) is not None
        tag = dialect.enforcing(strict, Calls()).constraint(strict, Calls())
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            engine.say(tag, random.Random(0))


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (
            {"type": "array", "uniqueItems": True},
            "uniqueItems is not supported, at odd#/properties/x/uniqueItems",
        ),
        (
            {"$ref": "#/$defs/none"},
            "Pointer '/$defs/none' does not exist, at odd#/properties/x/$ref",
        ),
    ],
)
@pytest.mark.parametrize("name", DIALECTS)
def test_what_is_wrong_with_a_tool_has_its_place_in_the_schema_of_that_tool(
    engine: Engine, name: str, wrong: dict[str, Any], complaint: str
) -> None:
    odd = {"type": "object", "properties": {"x": wrong}}
    dialect = DIALECTS[name]
    for tools in (MIXED, NAMES):
        named = [*tools, Tool("odd", parameters=odd, strict=True), Tool("later", parameters=CITY)]
        for calls in (Calls(), Calls(required=True), Calls(parallel=False), Calls.of("odd")):
            enforcing = dialect.enforcing(named, calls)
            with pytest.raises(InvalidRequest) as caught:
                engine.say(enforcing.constraint(named, calls), random.Random(0))
            told = enforcing.complaint(str(caught.value), named, calls)
            assert told is not None
            assert told.endswith(complaint)
    assert dialect.complaint("the grammar is too complex", MIXED, Calls()) is None


def test_nothing_is_enforced_without_need() -> None:
    tools = [Tool("now"), Tool("note", parameters=CITY)]
    for dialect in DIALECTS.values():
        assert dialect.constraint(tools, Calls()) is None
        alone = dialect.constraint(tools, Calls(parallel=False))
        assert (alone is None) == (dialect.stop is not None)


def test_the_dialect_is_that_of_the_template_or_of_the_operator() -> None:
    assert get_args(ToldDialect) == get_args(ToolDialect)
    for name in get_args(ToolDialect):
        assert dialect_of(shown(name)).name == name
        assert dialect_of(shown(None), name).name == dialect_of(None, name).name == name
    assert dialect_of(shown(None)).name == dialect_of(shown("hermes"), "plain").name == "plain"


PROPERTIES: Final[dict[str, Any]] = {
    "text": {"type": "string", "description": "Any."},
    "to": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "size": {"$ref": "#/$defs/size"},
    "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    "mode": {"anyOf": [{"enum": ["a", "5"], "type": "string"}, {"type": "null"}]},
    "more": {},
}
TEXTS: Final = (
    Tool(
        "write",
        parameters={
            "properties": PROPERTIES,
            "required": ["text", "size", "mode"],
            "$defs": {"size": {"enum": ["small", ""]}},
        },
        strict=True,
    ),
)


@pytest.mark.parametrize(
    ("texts", "arguments"),
    [
        (
            {"text": "5", "size": "small", "mode": "5"},
            {"text": "5", "size": "small", "mode": "5"},
        ),
        (
            {"text": "", "to": "null", "size": "", "mode": "null"},
            {"text": "", "to": None, "size": "", "mode": None},
        ),
        (
            {
                "text": "two\nlines, <tool_call>, <parameter=size> and </function>",
                "to": "5",
                "size": "small",
                "lines": "[1, 2]",
                "mode": "a",
                "more": "[null]",
            },
            {
                "text": "two\nlines, <tool_call>, <parameter=size> and </function>",
                "to": "5",
                "size": "small",
                "lines": [1, 2],
                "mode": "a",
                "more": [None],
            },
        ),
        ({"text": "x", "size": "large", "mode": "a"}, None),
        ({"text": "x", "size": "small", "lines": "[1, 2, 3]", "mode": "a"}, None),
        ({"text": "x", "size": "small"}, None),
    ],
)
@pytest.mark.parametrize("way", [0, -1])
@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax", "seed"])
def test_texts_between_tags_are_read_as_what_the_schema_allows(
    engine: Engine, name: str, way: int, texts: dict[str, str], arguments: dict[str, Any] | None
) -> None:
    """Without arguments, those that the texts would be are not allowed."""
    calls = Calls(required=True, parallel=False)
    dialect = DIALECTS[name].enforcing(TEXTS, calls)
    assert dialect.name == name
    tag: Any = dialect.constraint(TEXTS, calls)
    structure, members = tag["structures"][way], []
    for member in structure["members"]:
        (key,) = (key for key in PROPERTIES if key in member["begin"])
        if key in texts:
            members.append(member["begin"] + texts[key] + member["end"])
    said = structure["begin"] + "".join(members) + structure["end"]
    answer = engine.say(tag, random.Random(0), said)
    if arguments is None:
        assert answer != said
        return
    assert answer == said
    rest, (call,) = read(dialect, said, TEXTS)
    assert not rest and (call.name, json.loads(call.arguments)) == ("write", arguments)
    check([call], TEXTS, enforced=True)


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax", "seed"])
def test_calls_between_tags_may_follow_each_other_on_new_lines_or_directly(
    engine: Engine, name: str
) -> None:
    """Templates of later models write no line break between calls."""
    tag: Any = DIALECTS[name].constraint([Tool("now")], Calls(required=True))
    for structure in tag["structures"]:
        call = structure["begin"] + structure["end"]
        for between, is_right in (("\n", True), ("", True), ("\n\n", False), (" ", False)):
            assert engine.allows(tag, between.join([call] * 3)) == is_right


@pytest.mark.parametrize("name", ["qwen_xml", "glm", "minimax", "seed"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"type": "string", "maxLength": 3}}},
        {"properties": {"x": {"enum": ["5", 5]}}},
        {"properties": {"x": {"const": "a </parameter> or </arg_value>"}}},
        {"properties": {"x": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}}},
        {"properties": {"x": {"items": {"$ref": "#/properties/x"}, "type": "array"}}},
        {"properties": {"a<b": {"type": "integer"}}},
        {"properties": {"x": {"type": "integer"}}, "required": ["y"]},
        {"properties": {"x": {"type": "integer"}}, "required": [["x"]]},
        {"properties": {"x": {"type": "integer"}}, "minProperties": 1},
        {"properties": {"x": {"$ref": "#/$defs/none"}}},
        {"properties": {"x": {"anyOf": [{"type": "string"}] + [{"$ref": "#/properties/x"}] * 50}}},
        {"type": "object"},
    ],
)
def test_what_texts_between_tags_cannot_follow_is_enforced_in_the_plain_dialect(
    name: str, parameters: dict[str, Any]
) -> None:
    tools = [Tool("now"), Tool("odd", parameters=parameters)]

    def template_of(**asked: Any) -> Template:
        return Chat(messages=CHAT, tools=tools, **asked).template(shown(name))

    for enforced in (
        template_of(calls=Calls(required=True)),
        template_of(calls=Calls.of("odd")),
        template_of(form={"json_object": True}),
    ):
        assert enforced.dialect.name == "plain"
    assert template_of().dialect.name == name  # nothing is enforced
    assert template_of(calls=Calls.of("now")).dialect.name == name  # the other one is not called


OBJECTS: Final = Tool(
    "find",
    parameters={
        "properties": {
            "where": {"$ref": "#/$defs/place", "description": "Where."},
            "Kinds": {"type": "array", "items": {"enum": ["a", "", "b"]}, "minItems": 1},
            "share": {"anyOf": [{"type": "number", "maximum": 1}, {"type": "null"}]},
            "notes": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 4}},
            "more": True,
        },
        "required": ["where", "Kinds"],
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "in": {"$ref": "#/$defs/place"}},
                "required": ["name"],
            }
        },
    },
    strict=True,
)


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ({"Kinds": ["a"], "where": {"name": 'an "inn",\n{a:1}'}}, True),
        (
            {
                "Kinds": ["", "b"],
                "more": {"a b": [1, "x", {}], "c": None},
                "notes": {"one": "1"},
                "share": 0.5,
                "where": {"in": {"name": ""}, "name": "here"},
            },
            True,
        ),
        ({"Kinds": ["a"], "share": None, "notes": {}, "where": {"name": "x"}}, False),  # the order
        ({"Kinds": ["a"], "notes": {}, "share": None, "where": {"name": "x"}}, True),
        ({"Kinds": [], "where": {"name": "x"}}, False),
        ({"Kinds": ["c"], "where": {"name": "x"}}, False),
        ({"Kinds": ["a"], "share": 1.5, "where": {"name": "x"}}, False),
        ({"Kinds": ["a"], "notes": {"one": 1}, "where": {"name": "x"}}, False),
        ({"Kinds": ["a"], "notes": {"one": "é\n}1"}, "where": {"name": "x"}}, True),
        ({"Kinds": ["a"], "notes": {"one": "too long"}, "where": {"name": "x"}}, False),
        ({"Kinds": ["a"], "where": {"in": {"name": ""}}}, False),
        ({"Kinds": ["a"]}, False),
    ],
)
def test_objects_with_bare_keys_follow_their_schema_as_templates_write_them(
    engine: Engine, arguments: dict[str, Any], is_right: bool
) -> None:
    calls = Calls(required=True)
    dialect = DIALECTS["gemma4"].enforcing([OBJECTS], calls)
    assert dialect.name == "gemma4"
    said = f"<|tool_call>call:find{_bare(arguments)}<tool_call|>"
    assert engine.allows(dialect.constraint([OBJECTS], calls), said * 2) == is_right
    rest, (call, _) = read(dialect, said * 2)
    assert not rest and json.loads(call.arguments) == arguments


def _bare(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_bare(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_bare, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"x": {"type": "string", "pattern": "a"}}},
        {"properties": {"x": {"type": "string", "format": "date"}}},
        {"properties": {"x": {"enum": ["a", 'b <|"|>']}}},
        {"properties": {"x": {"oneOf": [{"type": "string"}, {"type": "null"}]}}},
        {"properties": {"x": {"type": "integer"}}, "required": ["y"]},
        {"properties": {"x": {"type": "integer"}}, "required": [["x"]]},
        {"properties": {"x": {"type": "integer"}}, "minProperties": 1},
        {"properties": {"x": {"$ref": "#/$defs/none"}}},
        {"properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"uniqueItems": True}}},
        {"properties": {'<|"|>': {"type": "integer"}}},
        {"properties": {"x": {"items": {"pattern": "a"}, "type": "array"}}},
        {"properties": {"x": {"items": False, "type": "array"}}},
    ],
)
def test_what_objects_with_bare_keys_cannot_follow_is_enforced_in_the_plain_dialect(
    parameters: dict[str, Any],
) -> None:
    """Calls that are not enforced are in their own, and a stop string ends an answer that may have
    one."""
    tools = [Tool("now"), Tool("odd", parameters=parameters)]

    def template_of(**asked: Any) -> Template:
        return Chat(messages=CHAT, tools=tools, **asked).template(shown("gemma4"))

    assert template_of(calls=Calls(required=True)).dialect.name == "plain"
    assert template_of(form={"json_object": True}).dialect.name == "plain"
    assert template_of(calls=Calls.of("now")).dialect.name == "gemma4"
    chat = Chat(messages=CHAT, tools=tools, calls=Calls(parallel=False))
    template = chat.template(shown("gemma4"))
    assert template.dialect.name == "gemma4"
    generation = chat.generation(Policy(1.0, 16), template)
    assert "structured_outputs" not in generation.parameters
    assert generation.own_stop == "<tool_call|>"
    assert generation.parameters["skip_special_tokens"] is False


def test_the_reader_of_calls_between_tags_knows_the_schemas() -> None:
    chat = Chat(messages=CHAT, tools=[Tool("weather", parameters=CITY)])
    reader = chat.reader(chat.template(shown("glm")))
    call = "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    assert reader.push(Delta(call)).calls == [CalledTool("weather", '{"days": 3}')]


def test_thoughts_of_gemma_beside_a_text_and_calls() -> None:
    said = "<|channel>thought\nIs it wet? <|tool_call>call:now{}<tool_call|>\n<channel|>I look."
    said += "<|tool_call>call:weather{days:3}<tool_call|><|tool_response>"
    thinking = ("<|channel>thought", "<channel|>")
    chat_format = ChatFormat("gemma4", frozenset(), thinking, False, frozenset())
    chat = Chat(messages=CHAT, tools=[Tool("weather", parameters=CITY)])
    template = chat.template(chat_format)
    assert chat.generation(Policy(1.0, 16), template).parameters["skip_special_tokens"] is False
    for pieces in ([said], [*said]):
        thoughts, text, calls = found_in(chat, template, pieces)
        assert thoughts == "Is it wet? <|tool_call>call:now{}<tool_call|>"
        assert (text, calls) == ("I look.", [CalledTool("weather", '{"days": 3}')])


def found_in(
    chat: Chat, template: Template, pieces: Sequence[str]
) -> tuple[str, str, list[CalledTool]]:
    """The thoughts, the text and the calls of an answer that comes in pieces."""
    reader = chat.reader(template)
    deltas = [Delta(piece) for piece in pieces] + [Delta(finish_reason="stop")]
    found = [reader.push(delta) for delta in deltas]
    calls = [call for piece in found for call in piece.calls]
    return "".join(p.thoughts for p in found), "".join(p.text for p in found), calls


CHAT: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            {"id": "2", "type": "function", "function": {"name": "now", "arguments": {"x": "é"}}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "Rain."},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "Noon."}]},
]


def test_a_template_without_tools_is_given_texts() -> None:
    plain = DIALECTS["plain"]
    told = plain.messages(CHAT, [Tool("weather", parameters=CITY, description="Of a city.")])
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    assert all(set(message) == {"role", "content"} for message in told)
    system, _, called, results = (message["content"] for message in told)
    assert system.startswith("Be brief.\n\n# Tools\n")
    assert '{"name": "weather", "description": "Of a city.", "parameters": {' in system
    rest, calls = read(plain, called)
    assert (rest, calls) == (
        "I look.",
        [CalledTool("weather", "{}"), CalledTool("now", '{"x": "é"}')],
    )
    assert results == (
        "<tool_response>\nRain.\n</tool_response>\n<tool_response>\nNoon.\n</tool_response>"
    )
    user = {"role": "user", "content": [{"type": "text", "text": "And then?"}], "name": "a"}
    *_, last = taken = plain.messages([*CHAT, user], [])
    assert len(taken) == 4, "a template may want the roles to take turns"
    assert last == {**user, "content": f"{results}\n\nAnd then?"}
    (alone, *_) = plain.messages(CHAT[1:], [Tool("weather")])
    assert alone["role"] == "system" and alone["content"].startswith("# Tools")
    assert plain.messages(CHAT[:2], []) == CHAT[:2]
    assert DIALECTS["hermes"].messages(CHAT, [Tool("weather")]) == CHAT


@pytest.mark.parametrize("dialect", [*DIALECTS.values(), dialect_of(shown("harmony"))])
def test_parts_of_a_message_are_joined_as_the_engine_joins_them(dialect: Dialect) -> None:
    parts = [{"type": "text", "text": text} for text in ("Error:", "no such file", "exit code 1")]
    chat = [{**message, "content": parts} for message in CHAT]
    told = dialect.messages(chat, [Tool("weather")])
    expected = dialect.messages([join_parts(message) for message in chat], [Tool("weather")])
    assert [join_parts(message) for message in told] == expected


def test_the_example_of_a_call_in_the_instructions_is_read_as_one() -> None:
    plain = DIALECTS["plain"]
    (system, _) = plain.messages(CHAT[1:2], [Tool("weather")])
    (called,) = read(plain, system["content"])[1]
    assert json.loads(called.arguments) == {"argument": "value"}


def test_ids_are_such_as_the_templates_of_mistral_take() -> None:
    function = {"name": "f", "arguments": "{}"}
    long, short = "call_0123456789abcdef", "aB3456789"
    calls = [{"id": one, "type": "function", "function": function} for one in (long, short)]
    told = DIALECTS["mistral"].messages(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": one, "content": "5"} for one in (long, short)),
        ],
        (),
    )
    ids = [call["id"] for call in told[1]["tool_calls"]]
    assert ids[1] == short
    assert len(ids[0]) == 9 and ids[0].isalnum()
    assert [message["tool_call_id"] for message in told[2:]] == ids


def test_calls_of_the_older_form_get_ids_for_the_templates_of_mistral() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "Hi", "name": "Ann"},
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "5"},
        ],
        "functions": [{"name": "f"}],
    }
    chat = chat_of(parse(ChatCompletionRequest, json.dumps(body).encode()))
    said, asked, answered = DIALECTS["mistral"].messages(chat.messages, chat.tools)
    (call,) = asked["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert answered["tool_call_id"] == call["id"]
    assert "tool_call_id" not in said


TURNS: Final = """{%- set count = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (count.turns % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set count.turns = count.turns + 1 %}
    {%- endif %}
{%- endfor %}"""
"""What Mistral's templates begin with."""


def test_what_agents_say_after_a_result_is_taken_by_the_templates_of_mistral() -> None:
    template = ChatTemplate(
        TURNS + chat_templates.MISTRAL_V3,
        {"bos_token": "<s>", "eos_token": "</s>"},
        max_chars=10**6,
    )
    call = {"id": "aB3456789", "type": "function", "function": {"name": "f", "arguments": {}}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "user", "content": "Now."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "aB3456789", "content": "5"},
        {"role": "user", "content": "<system-reminder>\nTests fail.\n</system-reminder>"},
    ]
    with pytest.raises(InvalidRequest, match="take turns"):
        template.render(chat)
    text = template.render(DIALECTS["mistral"].messages(chat, ()))
    assert "[INST]Look.\n\nNow.[/INST]" in text and "Tests fail." in text


def test_each_call_of_an_answer_is_a_message_for_the_templates_of_llama() -> None:
    """Models write several calls at once, and clients send them back so."""
    template = ChatTemplate(chat_templates.LLAMA_3_2, {"bos_token": ""}, max_chars=10**6)
    calls: list[dict[str, Any]] = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}
        for name in ("f", "g")
    ]
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in ("g", "f")),
    ]
    with pytest.raises(InvalidRequest, match="one call only"):
        template.render(chat)
    text = template.render(DIALECTS["llama3_json"].messages(chat, ()))
    told = ['{"name": "f"', "of f", '{"name": "g"', "of g"]
    assert sorted(told, key=text.index) == told


RENDERED: Final = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered(family: str, dialect: str, *marks: str) -> str:
    """The chat as the template of a family writes it."""
    found = dialect_of(shown(dialect, *marks))
    tools = [Tool("weather", parameters=CITY), Tool("now")]
    source = getattr(chat_templates, family)
    chat = json.loads(json.dumps(CHAT))
    for call in chat[2]["tool_calls"]:
        if isinstance(call["function"]["arguments"], str):  # as the server does
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    chat[4]["content"] = "Noon."
    return ChatTemplate(source, RENDERED, max_chars=10**6).render(
        found.messages(chat, tools), [found.tool(tool) for tool in tools]
    )


@pytest.mark.parametrize(
    ("family", "dialect", "marks"),
    [
        ("NEMOTRON_NANO_2", "nemotron", ()),
        ("LFM_2", "lfm2", ()),
        ("LFM_2_5", "lfm2", ("<|tool_call_start|>",)),
        ("COMMAND_R7B", "command", ()),
    ],
)
def test_earlier_calls_in_a_list_are_told_as_models_write_them(
    family: str, dialect: str, marks: tuple[str, ...]
) -> None:
    text = rendered(family, dialect, *marks)
    _, _, behind = text.partition("Weather?")
    _, calls = read(dialect_of(shown(dialect)), behind)
    assert calls == [CalledTool("weather", "{}"), CalledTool("now", '{"x": "é"}')]
    assert behind.count("I look.") == 1 and "Rain." in behind and "Noon." in behind


def test_texts_of_command_come_without_their_marks() -> None:
    said = "<|START_THINKING|>It may rain.<|END_THINKING|><|START_RESPONSE|>It rains."
    said += "<|END_RESPONSE|>"
    thinking = ("<|START_THINKING|>", "<|END_THINKING|>")
    chat_format = ChatFormat("command", frozenset(), thinking, False, frozenset())
    for tools in ([], [Tool("now")]):
        chat = Chat(messages=CHAT, tools=tools)
        template = chat.template(chat_format)
        assert chat.generation(Policy(1.0, 16), template).parameters["skip_special_tokens"] is False
        for pieces in ([said], [*said]):
            assert found_in(chat, template, pieces) == ("It may rain.", "It rains.", [])


def test_a_text_of_command_may_stand_between_its_marks_beside_a_strict_tool(
    engine: Engine,
) -> None:
    tag = DIALECTS["command"].constraint(STRICT, Calls())
    assert engine.allows(tag, "<|START_RESPONSE|>It rains.<|END_RESPONSE|>")
    call = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {}}]'
    assert not engine.allows(tag, f"{call}<|END_ACTION|>")  # the city is missing
    call = call.replace("{}", '{"city": "Bogotá"}')
    for line_break in ("", "\n    "):
        assert engine.allows(tag, call.replace("[", f"[{line_break}") + "<|END_ACTION|>")
