"""A chat request of any API, and the generation that answers it.

Each API translates its own schema to a ``Chat``; from there on all share one path:

    schema of an API -> Chat -> Generation (the engine) -> Delta, Result -> Piece -> that API's JSON

A route takes three steps. ``Service.received`` checks the body against a schema derived from
``strict_schema.Body``; a translation makes the ``Chat``; ``Service.answer_chat`` does the rest, at
once or as a stream, with an ``AnswerReader`` for each choice (``parts``) and the API's ``Renderer``
(``renderers``). It looks up the properties of the model's chat template, and handles errors before
and during a stream, clients that leave, limits on requests, and deadlines. Errors are ``ApiError``;
those of the engine are translated to the API's names (``Renderer.names``). Must not know any API's
JSON, or how a server is reached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from minisgl_client import strict_json
from minisgl_client.answer import ChatFormat
from minisgl_client.parameters import Parameters, StructuredOutputs

from minisgl_gateway import errors
from minisgl_gateway.channels import ChannelReader
from minisgl_gateway.dialects.base import Dialect, DialectName
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.errors import invalid
from minisgl_gateway.generation import MAX_STOPS, Generation, Policy, shared_parameters
from minisgl_gateway.json_schemas import kinds_of
from minisgl_gateway.parts import AnswerReader
from minisgl_gateway.template import Template, Wishes
from minisgl_gateway.thinking import ThinkingReader
from minisgl_gateway.tools import Calls, Tool


class Rendering(NamedTuple):
    """The inputs of the chat template; ``tools`` only if the template supports them."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    parameters: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A chat to be continued by the assistant.

    ``messages`` are in the form that chat templates know: roles ``system``, ``user``,
    ``assistant`` (with ``tool_calls`` and ``reasoning_content``) and ``tool``.

    ``form`` is the form of the answer's text, as the engine's ``structured_outputs`` (exactly one
    of ``json``, ``json_object``, ``regex``, ``choice``, ``grammar`` and ``structural_tag``).
    ``form_param``, ``tools_param`` and ``stop_param`` are the caller's parameters that asked for
    the form, the tools and the stop strings; errors about them use these names.

    ``wishes`` are for the template. With ``separates_thoughts``, what the model thinks comes as
    ``Thought`` instead of with the text.

    ``parameters`` are the caller's sampling parameters, by the engine's names. ``max_tokens`` is
    None if the caller gave none, and ``NO_LIMIT`` for as many as there is room for. With
    ``tells_counts`` deltas have the numbers of tokens; with ``tells_stop`` the end has the stop
    string that matched, and with ``includes_stop`` the text ends with it. ``n`` is the number of
    choices.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()
    calls: Calls = field(default_factory=Calls)
    form: Mapping[str, Any] | None = None
    form_param: str = "response_format"
    tools_param: str = "tools"
    wishes: Wishes = field(default_factory=Wishes)
    separates_thoughts: bool = True
    add_generation_prompt: bool = True
    parameters: Parameters = field(default_factory=Parameters)
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_param: str = "stop"
    cache_salt: str | None = None
    tells_counts: bool = True
    tells_stop: bool = False
    includes_stop: bool = False
    n: int = 1
    stream: bool = False

    @property
    def offers_tools(self) -> bool:
        """Whether the prompt describes tools, and calls are parsed from the answer."""
        return bool(self.tools) and self.calls.is_offered

    @property
    def enforces_calls(self) -> bool:
        """Whether the answer's calls follow a structural tag."""
        asks = self.form is not None or self.calls.required
        return self.offers_tools and (asks or any(tool.strict for tool in self.tools))

    def template(
        self, chat_format: ChatFormat | None, dialect: DialectName | None = None
    ) -> Template:
        """The template as it is for this chat, from its ``chat_format``, which is None if unknown.

        ``dialect`` is the operator's choice, if any.
        """
        found = dialect_of(chat_format, dialect)
        if self.enforces_calls:
            found = found.enforcing(self.tools, self.calls)
        return Template.of(chat_format, found, self.wishes)

    def complaint(self, dialect: Dialect, message: str) -> tuple[str, str]:
        """An error of the engine about the form of the answer: the caller's parameter that is at
        fault, and the message with places in the value of that parameter."""
        if not self.offers_tools:
            return self.form_param, message
        is_either = self.form is not None and not self.calls.required
        calls = replace(self.calls, required=True) if is_either else self.calls
        if (told := dialect.complaint(message, self.tools, calls)) is not None:
            return self.tools_param, told
        if is_either:
            return self.form_param, message.replace("#/otherwise", "#")
        return self.tools_param, message

    def reader(self, template: Template, own_stop: str | None = None) -> AnswerReader:
        """A reader for one choice."""
        if template.dialect.has_channels:
            channels = ChannelReader(
                has_calls=self.offers_tools,
                calls_alone=self.offers_tools and self.calls.required,
                separates_thoughts=self.separates_thoughts,
            )
            return AnswerReader(reader=channels, includes_stop=self.includes_stop)
        calls = template.dialect.text_reader()
        if self.offers_tools:
            calls = template.dialect.reader(self.tools, calls_alone=self.calls.required)
        thoughts = None
        if self.separates_thoughts and template.thinking is not None:
            thoughts = ThinkingReader(template.thinking, template.begins_thinking)
        return AnswerReader(calls, thoughts, own_stop, includes_stop=self.includes_stop)

    def generation(self, policy: Policy, template: Template) -> Generation:
        """The request to the engine; raises ``ApiError``."""
        parameters = shared_parameters(
            policy,
            self.max_tokens,
            policy.chat_tokens,
            cache_salt=self.cache_salt,
            tells_counts=self.tells_counts,
        )
        parameters.update(self.parameters)
        messages, tools, of_template = self.rendering(template)
        parameters.update(of_template)
        dialect = template.dialect
        form = self._form(dialect)
        if form is not None:
            parameters["structured_outputs"] = cast(StructuredOutputs, form)
        stops = list(self.stop)
        own_stop = None
        if self.offers_tools and not self.calls.parallel and form is None:
            own_stop = dialect.stop
        if own_stop is not None:
            if len(stops) == MAX_STOPS:
                raise invalid(
                    f"{self.stop_param} must have fewer than {MAX_STOPS} entries, as the end of a "
                    "tool call is one if there may be one call only",
                    self.stop_param,
                )
            stops.append(own_stop)
        if stops:
            parameters["stop"] = stops
            tells_stop = self.tells_stop or self.includes_stop or own_stop is not None
            parameters["return_stop_reason"] = tells_stop
        keeps_marks = dialect.keeps_special_tokens and (self.offers_tools or dialect.has_channels)
        if keeps_marks or (self.separates_thoughts and template.thinking is not None):
            parameters["skip_special_tokens"] = False
        if self.n > 1:
            parameters["n"] = self.n
        return Generation(parameters, messages=messages, tools=tools, own_stop=own_stop)

    def rendering(self, template: Template) -> Rendering:
        """The inputs that determine the prompt, without those that concern the answer; raises
        ``ApiError``."""
        tools = self.tools if self.offers_tools else ()
        self._check(tools, template.dialect)
        is_told = tools and template.dialect.is_of_template
        parameters = Parameters()
        if template.variables:
            parameters["chat_template_kwargs"] = template.variables
        if not self.add_generation_prompt:
            parameters["add_generation_prompt"] = False
        return Rendering(
            template.dialect.messages(self.messages, tools),
            [template.dialect.tool(tool) for tool in tools] if is_told else None,
            parameters,
        )

    def _form(self, dialect: Dialect) -> Mapping[str, Any] | None:
        """The constraint on the answer: calls, the form, or either of them."""
        if not self.offers_tools:
            return self.form
        calls = self.calls
        if self.form is None or calls.required:
            tag = dialect.constraint(self.tools, calls)
            return None if tag is None else {"structural_tag": tag}
        if not self.form.keys() & {"json", "json_object"}:
            raise invalid(
                f"{self.form_param} goes with tools only as JSON, if calls are up to the model",
                self.form_param,
            )
        tag = dialect.constraint(self.tools, replace(calls, required=True))
        return {"structural_tag": {**(tag or {}), "otherwise": self._schema()}}

    def _check(self, tools: Sequence[Tool], dialect: Dialect) -> None:
        """Refuse two tools of the same name, and enforced arguments that cannot be an object."""
        required = self.calls.required or self.form is not None
        calls = replace(self.calls, required=required)
        enforced = {tool.name for tool in dialect.enforced_tools(tools, calls)}
        names = set()
        for index, tool in enumerate(tools):
            place = f"{self.tools_param}[{index}]"
            if tool.name in names:
                raise invalid(
                    f"{place} has the name of another tool, {errors.shown(tool.name)}", place
                )
            names.add(tool.name)
            if tool.name in enforced and (wrong := _no_object(tool)):
                raise invalid(f"{self.tools_param}: {wrong}", place)

    def _schema(self) -> Any:
        """The JSON schema of the form."""
        schema = (self.form or {}).get("json", {"type": "object"})
        if not isinstance(schema, str):
            return schema
        try:
            return strict_json.loads(schema)
        except strict_json.Refused as error:
            raise invalid(f"{self.form_param}: {error}", self.form_param) from None
        except (ValueError, RecursionError):
            raise invalid(f"{self.form_param} must be valid JSON", self.form_param) from None


def _no_object(tool: Tool) -> str:
    """What is wrong with a tool's parameters if these allow no object; else ""."""
    parameters = tool.parameters or {}
    kind = parameters.get("type", "object")
    is_among = not tool.strict and isinstance(kind, list) and "object" in kind
    if kind != "object" and not is_among:
        return f"type must be 'object', got {errors.shown(kind)}, at {tool.name}#/type"
    for key, value in parameters.items():
        if key != "type" and "object" not in kinds_of({key: value}, parameters):
            got = errors.shown(value)
            return f"{key} must allow an object, got {got}, at {tool.name}#/{key}"
    return ""
