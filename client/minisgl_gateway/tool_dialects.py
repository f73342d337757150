"""How models are told about tools and call them, by family of models: the dialects.

A ``Dialect`` knows how calls are read out of an answer (``tool_calls``), and the structural tag
that keeps the engine to calls which follow their schemas. The tag's triggers are the openings that
the reader knows, so no call that is read has bypassed its schema. Must not know through which API a
request came.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

from minisgl_client.answer import ChatFormat

from minisgl_gateway import call_syntax
from minisgl_gateway.call_syntax import Syntax
from minisgl_gateway.errors import invalid, shown
from minisgl_gateway.harmony import FUNCTIONS
from minisgl_gateway.tool_calls import CallReader
from minisgl_gateway.turns import alternating, reminder

DialectName: TypeAlias = Literal["hermes", "llama3_json", "mistral", "harmony", "plain"]
Message: TypeAlias = Mapping[str, Any]
Schema: TypeAlias = dict[str, Any]
Structure: TypeAlias = dict[str, Any]
"""A beginning, the schema of the value after it, and an end, as in structural tags. If it is
``lenient``, keywords that cannot be enforced are ignored."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    ``parameters`` is a JSON schema of an object, None for none given. The arguments of a ``strict``
    tool follow it.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Which calls an answer may have, or must.

    If they are ``required``, the answer consists of calls alone; with ``name`` it is one call, of
    that tool. Without ``parallel`` there is at most one. Unless ``is_offered``, the model is not
    told about the tools.
    """

    is_offered: bool = True
    required: bool = False
    parallel: bool = True
    name: str | None = None

    @classmethod
    def of(cls, name: str) -> Calls:
        """One call of the tool with this name."""
        return cls(required=True, parallel=False, name=name)


def check_choice(names: Iterable[str], tools: Iterable[Tool], param: str) -> None:
    """Raise ``ApiError`` if ``param``, which names tools, names one that does not exist."""
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise invalid(f"{param} names {shown(name)}, which is none of the tools", param)


def allowed(names: Collection[str], tools: Iterable[Tool], param: str) -> list[Tool]:
    """The tools with these names; raises ``ApiError`` as ``check_choice`` does."""
    tools = list(tools)
    check_choice(names, tools, param)
    return [tool for tool in tools if tool.name in names]


def for_template(tool: Tool) -> dict[str, Any]:
    """A tool in the form that chat templates know."""
    return {"type": "function", "function": _function(tool)}


def _function(tool: Tool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {key: value for key, value in given.items() if value is not None}


class Dialect(ABC):
    """One way to call tools.

    With ``keeps_special_tokens`` special tokens mark the calls, so the answer's text must include
    them. ``is_of_template`` says whether the chat template takes tools, calls and their results.
    With ``has_channels`` each answer is messages in channels (``harmony``), with tools or without.
    """

    name: ClassVar[DialectName]
    syntax: ClassVar[Syntax]
    keeps_special_tokens: ClassVar[bool] = False
    is_of_template: ClassVar[bool] = True
    has_channels: ClassVar[bool] = False

    def reader(self, *, calls_alone: bool = False) -> CallReader:
        """A reader of one answer without channels; with ``calls_alone`` of one that is constrained
        to calls."""
        return CallReader(self.syntax, calls_alone=calls_alone)

    @property
    def stop(self) -> str | None:
        """The stop string that ends an answer after its first call, if there is one."""
        return self.syntax.closing or None

    @property
    def _triggers(self) -> Iterable[str]:
        """How calls begin in free text."""
        return self.syntax.openings

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """The chat as the template is given it; ``tools`` are those that the model may call."""
        return list(messages)

    def constraint(self, tools: Sequence[Tool], calls: Calls) -> dict[str, Any] | None:
        """The structural tag that an answer must follow; None if there is nothing to enforce.

        The text around calls is free, the arguments of strict tools follow their schemas, and those
        of the others are any JSON object. If calls are required, the answer consists of calls
        alone, and all arguments follow their schemas. If at most one call is allowed, it ends the
        answer; if that is the only constraint, ``stop`` enforces it without a tag.
        """
        required, parallel = calls.required, calls.parallel
        tools = _callable(tools, calls)
        is_enforced = required or any(tool.strict for tool in tools)
        if not is_enforced and (parallel or self.stop is not None):
            return None
        tag: dict[str, Any] = {
            "structures": self._structures(_arguments(tools, required), required, parallel),
            "stop_after_first": not parallel,
        }
        if required:
            return {**tag, "at_least_one": True, "separator": self._separator}
        return {**tag, "triggers": list(self._triggers)}

    def complaint(self, message: str, tools: Sequence[Tool], calls: Calls) -> str | None:
        """An error of the engine about the constraint, with its places in the schemas of tools, as
        in ``weather#/properties/city``; None if it is about none of them."""
        names = [tool.name for tool in _callable(tools, calls)]
        place = re.compile(self._place(names))
        told, num_places = place.subn(
            lambda found: f"{names[int(found['tool']) % len(names)]}#", message
        )
        if not num_places:
            return None
        what, at, places = told.partition(", at ")
        what = re.sub(f"'{self._inside}/", "'/", what)  # in a reference
        whole = [one for one in places.split(", ") if not one.startswith("#")]
        return what + at + ", ".join(dict.fromkeys(whole))

    _separator: ClassVar[str] = ""
    _inside: ClassVar[str] = ""
    """A regular expression for the place of a tool's schema in a structure's, if it is a part."""

    @abstractmethod
    def _structures(
        self, arguments: Mapping[str, _Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        """All calls that an answer may have: for each way to write one, the tools in the order of
        ``arguments``."""

    def _place(self, names: Collection[str]) -> str:
        """A regular expression for the place of a tool's schema in the constraint."""
        return r"#/structures/(?P<tool>\d+)/schema(?![^/, …])"


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What the arguments of a tool must follow. Keywords of the schema that cannot be enforced are
    ignored if it ``is_lenient``, and errors otherwise."""

    schema: Schema
    is_lenient: bool

    def between(self, begin: str, end: str = "") -> Structure:
        """The arguments, as they appear in a call."""
        return _structure(begin, self.schema, end, is_lenient=self.is_lenient)


def _structure(begin: str, schema: Schema, end: str, *, is_lenient: bool) -> Structure:
    structure: Structure = {"begin": begin, "schema": schema, "end": end}
    return {**structure, "lenient": True} if is_lenient else structure


def _callable(tools: Sequence[Tool], calls: Calls) -> Sequence[Tool]:
    """The tools that may be called."""
    return [tool for tool in tools if calls.name in (None, tool.name)]


def _arguments(tools: Iterable[Tool], required: bool) -> dict[str, _Arguments]:
    """What the arguments must follow, by tool: their schema, or any object if they need not."""
    arguments: dict[str, _Arguments] = {}
    for tool in tools:
        schema: Schema = {}
        if tool.strict or required:
            schema = {**(tool.parameters or {})}
        arguments[tool.name] = _Arguments({**schema, "type": "object"}, not tool.strict)
    return arguments


class _Hermes(Dialect):
    """Hermes, Qwen 2.5, Qwen 3 and others."""

    name: ClassVar[DialectName] = "hermes"
    syntax = call_syntax.HERMES
    _separator = "\n"

    def _structures(
        self, arguments: Mapping[str, _Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        (opening,), closing = self.syntax.openings, self.syntax.closing
        return [
            of_tool.between(f'{opening}\n{{"name": {_json(name)}, "arguments": ', f"}}\n{closing}")
            for name, of_tool in arguments.items()
        ]


class _Plain(_Hermes):
    """For templates that know no tools: a system message describes them and asks for calls in
    Hermes' form; earlier calls and their results are texts."""

    name = "plain"
    is_of_template = False
    _separator = ""
    """Otherwise a token such as ``>\\n`` at a call's end would force the next call."""

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        plain: list[Message] = []
        results: list[str] = []
        """Of the calls of one message: templates want the roles to take turns."""
        for message in messages:
            text = _text(message.get("content"))
            if message["role"] == "tool":
                results.append(f"<tool_response>\n{text}\n</tool_response>")
                continue
            if results:
                told = "\n".join(results)
                results.clear()
                if message["role"] == "user":
                    plain.append({**message, "content": f"{told}\n\n{text}"})
                    continue
                plain.append({"role": "user", "content": told})
            if calls := message.get("tool_calls"):
                parts = [text] if text else []
                content = "\n".join([*parts, *(_spelled(call["function"]) for call in calls)])
                kept = {key: message[key] for key in message if key != "tool_calls"}
                plain.append({**kept, "content": content})
            else:
                plain.append(message)
        if results:
            plain.append({"role": "user", "content": "\n".join(results)})
        if not tools:
            return plain
        system = [self.instructions(tools)]
        if plain and plain[0]["role"] == "system":
            system.insert(0, _text(plain.pop(0).get("content")))
        return [{"role": "system", "content": "\n\n".join(filter(None, system))}, *plain]

    def instructions(self, tools: Sequence[Tool]) -> str:
        """What the system message says about the tools."""
        return "\n".join(
            [
                "# Tools",
                "",
                "You may call these functions:",
                "<tools>",
                *(_json(_function(tool)) for tool in tools),
                "</tools>",
                "",
                "To call one, write its name and its arguments as JSON between these tags, for "
                "each call anew:",
                _spelled({"name": "name of the function", "arguments": '{"argument": "value"}'}),
                "Then end your answer: the results will be told between <tool_response> and "
                "</tool_response>.",
            ]
        )


class _Llama(Dialect):
    """Llama 3.1 and later, in its JSON form."""

    name = "llama3_json"
    syntax = call_syntax.LLAMA
    keeps_special_tokens = True
    _separator = "; "

    def _structures(
        self, arguments: Mapping[str, _Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        tag, bare, typed = self.syntax.openings
        openings = (
            [f"{bare}: "] if required else [f"{tag}{bare}: ", f"{bare}: ", f'{typed}, "name": ']
        )
        return [
            of_tool.between(f'{opening}{_json(name)}, "parameters": ', "}")
            for opening in openings
            for name, of_tool in arguments.items()
        ]


class _Mistral(Dialect):
    """Mistral. Calls are a JSON list; with ``is_spelled``, and if their names allow it, they come
    one by one, each after its name, as models since the middle of 2025 write them. Templates accept
    only ids of nine letters and digits, and user and assistant in turn."""

    name = "mistral"
    syntax = call_syntax.MISTRAL
    keeps_special_tokens = True
    _inside = r"/items/anyOf/(?P<tool>\d+)/properties/arguments"

    def __init__(self, *, is_spelled: bool) -> None:
        self._is_spelled = is_spelled

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        told: list[Message] = []
        for message in alternating(messages):
            if calls := message.get("tool_calls"):
                calls = [
                    {**call, "id": _short_id(call["id"])} if "id" in call else call
                    for call in calls
                ]
                message = {**message, "tool_calls": calls}
            elif answered := message.get("tool_call_id"):
                message = {**message, "tool_call_id": _short_id(answered)}
            told.append(message)
        return told

    def _structures(
        self, arguments: Mapping[str, _Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        (opening,) = self.syntax.openings
        if self._are_spelled(arguments):
            return [
                of_tool.between(f"{opening}{name}{call_syntax.ARGUMENTS}")
                for name, of_tool in arguments.items()
            ]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(
                        of_tool.schema, f"#/items/anyOf/{index}/properties/arguments"
                    ),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for index, (name, of_tool) in enumerate(arguments.items())
        ]
        found: Schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        if not parallel:
            found["maxItems"] = 1
        is_lenient = all(of_tool.is_lenient for of_tool in arguments.values())
        return [
            _structure(opening + blank, found, "", is_lenient=is_lenient) for blank in (" ", "")
        ]

    def _place(self, names: Collection[str]) -> str:
        if self._are_spelled(names):
            return super()._place(names)
        return rf"#/structures/\d+/schema{self._inside}"

    def _are_spelled(self, names: Iterable[str]) -> bool:
        return self._is_spelled and all(map(call_syntax.is_plain_name, names))


_HEADERS: Final[Mapping[str, str]] = {
    f"<|channel|>commentary to={FUNCTIONS}": " <|constrain|>json<|message|>",
    f" to={FUNCTIONS}": "<|channel|>commentary <|constrain|>json<|message|>",
}
"""What comes before and after the name of the function that a message calls."""


class _Harmony(Dialect):
    """gpt-oss: answers in channels, whose last message may be a call, at most one. It ends with an
    end token, so no stop string is needed.

    Templates take one call per message, thoughts as ``thinking``, and with a call either those or a
    text, which they present as thoughts. They drop system messages that are not the first.
    """

    name = "harmony"
    keeps_special_tokens = True
    has_channels = True
    stop = None
    _triggers = _HEADERS

    def messages(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        told: list[Message] = []
        results = {
            message["tool_call_id"]: message
            for message in messages
            if message["role"] == "tool" and "tool_call_id" in message
        }
        placed: set[str] = set()
        for index, message in enumerate(messages):
            if message["role"] == "tool" and message.get("tool_call_id") in placed:
                continue
            if message["role"] == "system" and index > 0:
                told.append(reminder(message))
                continue
            thoughts = message.get("reasoning_content")
            plain = {key: message[key] for key in message if key != "reasoning_content"}
            if not (calls := message.get("tool_calls")):
                told.append({**plain, "thinking": thoughts} if thoughts else plain)
                continue
            said = "\n\n".join(filter(None, [thoughts, _text(message.get("content"))]))
            for call in calls:
                told.append({**plain, "content": "", "tool_calls": [call]})
                if said:
                    told[-1] = {**told[-1], "thinking": said}
                    said = ""
                if len(calls) > 1 and (result := results.get(call.get("id"))) is not None:
                    told.append(result)
                    placed.add(call["id"])
        return told

    def constraint(self, tools: Sequence[Tool], calls: Calls) -> dict[str, Any] | None:
        """The structures are messages of their own: the engine knows that such a message ends the
        answer, and that thoughts may come before it."""
        tag = super().constraint(tools, replace(calls, parallel=True))
        return None if tag is None else {**tag, "stop_after_first": True}

    def _structures(
        self, arguments: Mapping[str, _Arguments], required: bool, parallel: bool
    ) -> list[Structure]:
        return [
            of_tool.between(f"{header}{name}{rest}")
            for header, rest in _HEADERS.items()
            for name, of_tool in arguments.items()
        ]


def dialect_of(chat_format: ChatFormat | None, option: DialectName | None = None) -> Dialect:
    """The dialect that a chat template reveals, or the one that the operator chose."""
    name = option or (chat_format and chat_format.tool_dialect)
    if name == "mistral":
        return _Mistral(
            is_spelled=chat_format is not None and call_syntax.ARGUMENTS in chat_format.tool_marks
        )
    return _DIALECTS.get(name or "plain", _DIALECTS["plain"])


_DIALECTS: Final[Mapping[str, Dialect]] = {
    dialect.name: dialect for dialect in (_Hermes(), _Llama(), _Harmony(), _Plain())
}


_OF_ROOTS: Final = ("$id", "$schema", "x-guidance")
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_VALUES: Final = ("const", "enum", "default", "examples")


def _moved(root: Mapping[str, Any], place: str) -> Schema:
    """A schema moved to a place in another one: its references to itself are changed."""

    def moved(schema: Any) -> Any:
        if isinstance(schema, list):
            return [moved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        found: Schema = {}
        for key, value in schema.items():
            if key in _BY_NAME and isinstance(value, dict):
                found[key] = {name: moved(inner) for name, inner in value.items()}
            elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
                found[key] = place + value[1:]
            else:
                found[key] = value if key in _VALUES else moved(value)
        return found

    return {key: value for key, value in moved(dict(root)).items() if key not in _OF_ROOTS}


def _spelled(function: Mapping[str, Any]) -> str:
    """A call as Hermes writes it."""
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = _json(arguments)
    call = f'{{"name": {_json(function["name"])}, "arguments": {arguments}}}'
    return f"{call_syntax.HERMES.openings[0]}\n{call}\n{call_syntax.HERMES.closing}"


def _short_id(call_id: str) -> str:
    """Nine letters and digits for an id, always the same for the same id."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")


def _text(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
