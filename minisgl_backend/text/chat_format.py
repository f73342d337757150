"""What a chat template reveals about the model's answers: how tool calls are written, and whether
an answer begins with thoughts.

Derived once from the texts in the template's program, without comments, and for each rendered
prompt from its end. Must not know tokens, or how answers are parsed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from jinja2 import meta, nodes

ToolDialect: TypeAlias = Literal[
    "hermes",
    "qwen_xml",
    "glm",
    "minimax",
    "seed",
    "gemma4",
    "llama3_json",
    "mistral",
    "nemotron",
    "lfm2",
    "command",
    "harmony",
]

_THINKING: Final = (
    ("[THINK]", "[/THINK]"),
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_ANALYSIS: Final = ("<|channel|>analysis<|message|>", "<|end|>")
"""The marks around the thoughts of an answer in channels."""
_MARKS: Final[dict[ToolDialect, tuple[str, ...]]] = {
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_xml": ("<tool_call>", "</tool_call>", "<function=", "<parameter="),
    "glm": ("<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"),
    "minimax": (
        *("<minimax:tool_call>", "</minimax:tool_call>"),
        *('<invoke name="', '<parameter name="'),
    ),
    "seed": ("<seed:tool_call>", "</seed:tool_call>", "<function=", "<parameter="),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "llama3_json": ("<|python_tag|>",),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "command": (
        *("<|START_ACTION|>", "<|END_ACTION|>"),
        *("<|START_RESPONSE|>", "<|START_TEXT|>"),
    ),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
}
_MARKED: Final[tuple[ToolDialect, ...]] = ("qwen_xml", "glm", "minimax", "seed", "gemma4")
"""Dialects of templates that write all of their marks."""
_TOOLS_OF_LFM: Final = "<|tool_list_start|>"
"""What the first templates of LFM2 write around tools; they write no calls."""
_OTHERS: Final = ("<function=", "<arg_key>")
"""Marks of other dialects that resemble these, as far as they are none of them."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What is known about the answer to one rendered chat.

    ``thinking`` are the marks around thoughts, None if the answer has no thoughts. The answer
    begins inside thoughts if ``begins_thinking``; else, if it has any, it begins with the first
    mark. With the dialect ``harmony`` the answer is in channels, if the prompt has begun it.
    """

    tool_dialect: ToolDialect | None
    """How calls are written; None if the template has no tools, or an unknown dialect."""
    tool_marks: frozenset[str]
    """The marks of the dialect that the template writes; they depend on its version."""
    thinking: tuple[str, str] | None
    begins_thinking: bool
    variables: frozenset[str]
    """The variables that the template reads, such as ``messages`` and ``enable_thinking``. May
    include names that the template itself sets in one of several branches."""

    @property
    def has_channels(self) -> bool:
        """Whether the answer is messages in channels, of which the prompt has begun the first."""
        return self.tool_dialect == "harmony" and self.thinking is not None

    def to_json(self) -> str:
        """As JSON, for clients of the model ``tokenizer``."""
        return json.dumps(
            {
                "tool_dialect": self.tool_dialect,
                "tool_marks": sorted(self.tool_marks),
                "thinking": self.thinking,
                "begins_thinking": self.begins_thinking,
                "variables": sorted(self.variables),
            }
        )


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template's program reveals about all answers."""

    tool_dialect: ToolDialect | None
    tool_marks: frozenset[str]
    thinking: tuple[str, str] | None
    variables: frozenset[str]

    @classmethod
    def of(cls, program: nodes.Template) -> TemplateFacts:
        """The facts of a parsed template."""
        variables = frozenset(meta.find_undeclared_variables(program))
        text = "\n".join(_texts(program))
        dialect = _dialect(text) if "tools" in variables else None
        marks = _MARKS[dialect] if dialect is not None else ()
        thinking = next((marks for marks in _THINKING if marks[1] in text), None)
        return cls(
            tool_dialect=dialect,
            tool_marks=frozenset(mark for mark in marks if mark in text),
            thinking=_ANALYSIS if dialect == "harmony" else thinking,
            variables=variables,
        )

    def of_prompt(self, prompt: str, *, tools: TemplateFacts) -> ChatFormat:
        """What is known about the answer to a prompt that the template rendered.

        ``tools`` are the facts of the template for chats with tools.
        """
        thinking, end = self.thinking, prompt.rstrip()
        begins_thinking = thinking is not None and end.endswith(thinking[0])
        if thinking is not None and end.endswith(thinking[1]):  # the prompt has ended the thoughts
            thinking = None
        return ChatFormat(
            tool_dialect=tools.tool_dialect,
            tool_marks=tools.tool_marks,
            thinking=thinking,
            begins_thinking=begins_thinking,
            variables=self.variables,
        )


def _texts(program: nodes.Template) -> list[str]:
    """All texts of a program: those that it outputs verbatim, and its string constants."""
    written = [node.data for node in program.find_all(nodes.TemplateData)]
    consts = [node.value for node in program.find_all(nodes.Const)]
    return [*written, *(value for value in consts if isinstance(value, str))]


def _dialect(text: str) -> ToolDialect | None:
    if all(mark in text for mark in ("<|channel|>commentary", "<|channel|>final<|message|>")):
        return "harmony"
    if "[TOOL_CALLS]" in text:
        return "mistral"
    for marked in _MARKED:
        if all(mark in text for mark in _MARKS[marked]):
            return marked
    if any(mark in text for mark in _OTHERS):
        return None
    if all(mark in text for mark in ("<|START_ACTION|>", '"tool_name"')):
        return "command"
    if _MARKS["lfm2"][0] in text or _TOOLS_OF_LFM in text:
        return "lfm2"
    if "<TOOLCALL>" in text:
        return "nemotron" if '"arguments"' in text else None
    if "<tool_call>" in text and '"arguments"' in text:
        return "hermes"
    if all(part in text for part in ('"parameters"', "<|start_header_id|>", "ipython")):
        return "llama3_json"
    return None
