"""The request of the Responses API, field by field, as OpenAI names them.

The same rules as in ``completions.schema``: what is not known is refused by name, and null is
"not given". What an SDK adds to the items of an answer, and sends back with them, is taken and not
used.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from minisgl_gateway.form_schema import TextForm
from minisgl_gateway.shared_fields import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_TOOLS,
    DirectCaller,
    Effort,
    PromptCacheOptions,
    RefusalPart,
    ServiceTier,
    label,
    read_by_sdk,
)
from minisgl_gateway.strict_schema import Body, Strict, by_type

Status = Literal["in_progress", "completed", "incomplete"]


def _status() -> Any:
    """The state of an item that a caller sends back; it does not change how the item is read."""
    return Field(None, exclude=True, description="of an item of an answer; no effect")


# --- items ---------------------------------------------------------------------------------------


class InputText(Strict):
    """A piece of what the user, or a tool, says; texts only."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Any = label("prefixes are always cached; no effect")


class OutputText(Strict):
    """A piece of an earlier answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Any = read_by_sdk()
    parsed: Any = read_by_sdk()


Part = Annotated[InputText | OutputText | RefusalPart, Field(discriminator="type")]
InputTexts = Annotated[list[InputText], Field(fail_fast=True)]


class MessageItem(Strict):
    """What was said; ``developer`` is the newer name of the role ``system``."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    id: str | None = None
    status: Status | None = _status()
    phase: str | None = label("of an item of an answer; no effect")


class FunctionCallItem(Strict):
    """A call that the model made earlier; ``arguments`` is JSON in a string."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: str | None = None
    status: Status | None = _status()
    caller: DirectCaller | None = None
    parsed_arguments: Any = read_by_sdk()


class FunctionCallOutputItem(Strict):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | InputTexts
    name: str | None = None
    namespace: str | None = label("of the call, which has it, too; no effect")
    id: str | None = None
    status: Status | None = _status()
    caller: DirectCaller | None = None


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """What the model thought before; without its text, that of the summary stands for it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = label("of another server, which alone can read it; no effect")
    status: Status | None = _status()


class ItemReference(Strict):
    """An item of an answer that the gateway keeps."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _kind_of_item(value: Any) -> str | None:
    """The ``type`` of an item, which messages and references may lack."""
    given = {name for name in value if value[name] is not None} if isinstance(value, dict) else None
    return "item_reference" if given == {"id"} else by_type("message")(value)


OutputItem = Annotated[MessageItem | FunctionCallItem | ReasoningItem, Field(discriminator="type")]
"""What an assistant said, called or thought."""
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind_of_item),
]


# --- tools, and the form of the answer -----------------------------------------------------------


class FunctionTool(Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None,
        description="whether arguments follow the schema; if it is not given, they do if the "
        "schema has nothing but keywords that can be enforced",
    )
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamespaceTool(Strict):
    """Functions under a common name; a call has this name and the function's."""

    type: Literal["namespace"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = Field(None, description="stands before that of each function")
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ResponsesTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class FunctionChoice(Strict):
    """Exactly this function is to be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """These of the tools may be called, or with ``required`` one of them must."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)
    ]


Mode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[Mode, Tag("string")]
    | Annotated[FunctionChoice, Tag("function")]
    | Annotated[AllowedTools, Tag("allowed_tools")],
    Discriminator(by_type(of_string="string")),
]


class JsonObjectConfig(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaConfig(Strict):
    """JSON that a schema allows; it is enforced in either case."""

    type: Literal["json_schema"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    json_schema: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """The form of the answer."""

    format: (
        Annotated[TextForm | JsonObjectConfig | JsonSchemaConfig, Field(discriminator="type")]
        | None
    ) = None
    verbosity: str | None = label("not known to the model; no effect")


class ReasoningConfig(Strict):
    """How much the model thinks before it answers, if its chat template can say so."""

    effort: Effort | None = None
    summary: str | None = label("thoughts are told as they are; no effect")
    generate_summary: str | None = label("thoughts are told as they are; no effect")
    mode: Literal["standard"] | None = None
    context: Literal["auto", "all_turns", "current_turn"] | None = Field(
        None, description="the chat template decides what it shows of earlier thoughts; no effect"
    )


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = None


class InputTokensRequest(Body):
    """A conversation, whose tokens are counted or which is to be answered."""

    not_offered = MappingProxyType({"conversation": (), "personality": ()})

    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        default_factory=list
    )
    instructions: str | None = Field(
        None, description="a system message before all; not carried over to the next response"
    )
    previous_response_id: str | None = Field(
        None, description="the kept response whose conversation goes on"
    )
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["disabled"] = Field(
        "disabled", description="a conversation that is too long is refused"
    )


class ResponsesRequest(InputTokensRequest):
    """What is to be answered, as items or as one text of the user."""

    not_offered = MappingProxyType(
        {
            **InputTokensRequest.not_offered,
            "access_programs": (),
            "background": (False,),
            "background_options": (),
            "context_management": ([],),
            "frequency_penalty": (0,),
            "image": (),
            "moderation": (),
            "n": (1,),
            "presence_penalty": (0,),
            "prompt": (),
            "seed": (),
            "stop": ([],),
        }
    )
    without_effect = frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        }
    )

    model: str
    input: str | Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    store: bool = Field(True, description="whether the response is kept, while there is room")
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, ge=0, le=1, description="0: the likeliest token")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: (
        Annotated[
            list[
                Literal[
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                    "file_search_call.results",
                    "message.input_image.image_url",
                    "message.output_text.logprobs",
                    "reasoning.encrypted_content",
                    "web_search_call.action.sources",
                    "web_search_call.results",
                ]
            ],
            Field(fail_fast=True),
        ]
        | None
    ) = Field(
        None, description="message.output_text.logprobs; the others are of what never comes here"
    )
    metadata: dict[str, str] | None = Field(None, description="told again in the answer")
    client_metadata: dict[str, Any] | None = label("of Codex; no effect")
    user: str | None = label()
    safety_identifier: str | None = label()
    prompt_cache_key: str | None = label()
    prompt_cache_retention: str | None = label("prefixes stay while there is room; no effect")
    prompt_cache_options: PromptCacheOptions | None = label(
        "prefixes stay while there is room; no effect"
    )
    service_tier: ServiceTier | None = label("there is one; no effect")
    max_tool_calls: int | None = label("of tools that are run here, of which there are none")
