"""Messages and tools of a chat, and which tool is to be called, as OpenAI's API names them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from minisgl_gateway.shared_fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    RefusalPart,
    cache_control,
    read_by_sdk,
)
from minisgl_gateway.strict_schema import Strict, by_type


class TextPart(Strict):
    """A piece of a message; texts only."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = cache_control()
    cache_control: Any = cache_control()


def _of_answer() -> Any:
    """A field of an answer that openai-agents for JavaScript sends back beside the answer's text;
    the calls stand in the message, too."""
    return Field(None, exclude=True, description="from openai-agents for JavaScript; no effect")


class AnswerPart(TextPart):
    """A piece of an earlier answer."""

    role: Literal["assistant"] | None = _of_answer()
    reasoning_content: Any = _of_answer()
    tool_calls: Any = _of_answer()
    function_call: Any = _of_answer()
    annotations: Annotated[list[Any], Field(max_length=0)] | None = _of_answer()


Content = str | Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]
AnswerContent = (
    str
    | Annotated[
        list[Annotated[AnswerPart | RefusalPart, Field(discriminator="type")]],
        Field(min_length=1, fail_fast=True),
    ]
)


ResultContent = str | Annotated[list[TextPart], Field(fail_fast=True)]
"""What a tool answered, which may be nothing."""


class FunctionCall(Strict):
    """A call that the model made earlier; ``arguments`` is JSON in a string."""

    name: str
    arguments: str
    parsed_arguments: Any = read_by_sdk()


class ToolCall(Strict):
    """``index`` is from a chunk of a stream, as which callers send calls back."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, exclude=True)


class SystemMessage(Strict):
    """Instructions; ``developer`` is the newer name of the same role."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None
    cache_control: Any = cache_control()


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: str | None = None
    cache_control: Any = cache_control()


class AssistantMessage(Strict):
    """An earlier answer: text, calls of tools, or both. Callers send answers back with all their
    empty fields."""

    role: Literal["assistant"]
    content: AnswerContent | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    reasoning_content: str | None = Field(None, description="what the model thought")
    reasoning: str | None = Field(None, description="the same, as vLLM has it")
    name: str | None = None
    refusal: str | None = Field(None, description="what another model said in place of an answer")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: FunctionCall | None = Field(None, description="the older form of tool_calls")
    parsed: Any = read_by_sdk()
    provider_specific_fields: Any = Field(
        None, exclude=True, description="what LiteLLM adds to an answer; no effect"
    )
    cache_control: Any = cache_control()


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: ResultContent
    tool_call_id: str | None = None
    name: str | None = None
    cache_control: Any = cache_control()


class FunctionMessage(Strict):
    """What a function answered, in the older form."""

    role: Literal["function"]
    content: ResultContent | None = None
    name: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class OlderFunction(Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Function(OlderFunction):
    """The same of a tool."""

    strict: bool | None = Field(None, description="whether arguments follow the schema for sure")


class Tool(Strict):
    type: Literal["function"]
    function: Function
    cache_control: Any = cache_control()


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
OlderFunctions = Annotated[list[OlderFunction], Field(max_length=MAX_TOOLS, fail_fast=True)]


class NamedFunction(Strict):
    """One of the functions."""

    name: str


class NamedTool(Strict):
    """One of the tools, which must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedToolList(Strict):
    """With ``required`` one of the tools must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChatTools(Strict):
    """The only tools that may be called now; the model is not told of the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


ChatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("string")]
    | Annotated[NamedTool, Tag("function")]
    | Annotated[AllowedChatTools, Tag("allowed_tools")],
    Discriminator(by_type(of_string="string")),
]
OlderChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("string")] | Annotated[NamedFunction, Tag("object")],
    Discriminator(lambda choice: "string" if isinstance(choice, str) else "object"),
]
