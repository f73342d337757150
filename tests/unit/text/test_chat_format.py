"""What chat templates reveal about answers: the dialect of calls, thinking, and variables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.errors import Unsupported
from minisgl_backend.request import Grammar, GrammarKind, SamplingParams
from minisgl_backend.text.chat_format import ChatFormat
from minisgl_backend.text.template import ChatTemplate
from minisgl_backend.text.tokenizer import PromptEncoder, RenderedChat
from minisgl_backend.wire.generation import MessagesPrompt, TextPrompt
from tests.fakes import chat_templates, vocabularies

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
THINK = ("<think>", "</think>")
PLAN = ("<|START_THINKING|>", "<|END_THINKING|>")
COMMAND = {"<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>"}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What follows </think>, <think> or [THINK]?"},
    {"role": "assistant", "content": "Nothing. <tool_call>"},
    {"role": "user", "content": "<think>"},
]
LOOK = {"name": "look", "description": "It looks.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": LOOK}]


def shown(source: str, **variables: Any) -> ChatFormat:
    """The format of the answer to a chat with tricky texts."""
    template = ChatTemplate(source, TOKENS, max_chars=10**6)
    rendered = template.render(CHAT, TOOLS, variables)
    return template.facts.of_prompt(rendered, tools=template.facts)


@pytest.mark.parametrize(
    ("family", "dialect", "marks", "thinking", "begins_thinking"),
    [
        ("QWEN2_5", "hermes", {"<tool_call>", "</tool_call>"}, None, False),
        ("QWEN3", "hermes", {"<tool_call>", "</tool_call>"}, THINK, False),
        ("QWEN3_THINKING", "hermes", {"<tool_call>", "</tool_call>"}, THINK, True),
        ("EXAONE_4", "hermes", {"<tool_call>", "</tool_call>"}, None, False),
        (
            "QWEN3_CODER",
            "qwen_xml",
            {"<tool_call>", "</tool_call>", "<function=", "<parameter="},
            None,
            False,
        ),
        (
            "STEP_3_5",
            "qwen_xml",
            {"<tool_call>", "</tool_call>", "<function=", "<parameter="},
            THINK,
            True,
        ),
        (
            "GLM_4_5",
            "glm",
            {"<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"},
            None,
            False,
        ),
        (
            "LING_3",
            "glm",
            {"<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"},
            THINK,
            False,
        ),
        (
            "MINIMAX_M2",
            "minimax",
            {
                "<minimax:tool_call>",
                "</minimax:tool_call>",
                '<invoke name="',
                '<parameter name="',
            },
            THINK,
            True,
        ),
        (
            "SEED_OSS",
            "seed",
            {"<seed:tool_call>", "</seed:tool_call>", "<function=", "<parameter="},
            ("<seed:think>", "</seed:think>"),
            False,
        ),
        ("NEMOTRON_NANO_2", "nemotron", {"<TOOLCALL>", "</TOOLCALL>"}, THINK, True),
        (
            "NEMOTRON_3",
            "qwen_xml",
            {"<tool_call>", "</tool_call>", "<function=", "<parameter="},
            THINK,
            True,
        ),
        ("LFM_2", "lfm2", set(), None, False),
        ("LFM_2_5", "lfm2", {"<|tool_call_start|>", "<|tool_call_end|>"}, THINK, False),
        ("COMMAND_R7B", "command", COMMAND, PLAN, False),
        ("COMMAND_A_REASONING", "command", COMMAND, PLAN, True),
        ("DEEPSEEK_R1_DISTILL", None, set(), THINK, True),
        ("DEEPSEEK_R1_DISTILL_FIRST", None, set(), THINK, False),
        ("LLAMA_3", None, set(), None, False),
        ("LLAMA_3_1", "llama3_json", {"<|python_tag|>"}, None, False),
        ("LLAMA_3_2", "llama3_json", set(), None, False),
        ("LLAMA_3_3", "llama3_json", {"<|python_tag|>"}, None, False),
        ("MISTRAL_V3", "mistral", {"[TOOL_CALLS]"}, None, False),
        ("MISTRAL_V11", "mistral", {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}, None, False),
        ("MISTRAL_V13", "mistral", {"[TOOL_CALLS]", "[ARGS]"}, None, False),
        ("MAGISTRAL", "mistral", {"[TOOL_CALLS]", "[ARGS]"}, ("[THINK]", "[/THINK]"), False),
        ("MAGISTRAL_FIRST", "mistral", {"[TOOL_CALLS]", "[ARGS]"}, THINK, False),
        ("HERMES_3", None, set(), None, False),
        ("HERMES_3_TOOL_USE", "hermes", {"<tool_call>", "</tool_call>"}, None, False),
        (
            "GEMMA_4_SMALL",
            "gemma4",
            {"<|tool_call>", "<tool_call|>", '<|"|>'},
            ("<|channel>thought", "<channel|>"),
            False,
        ),
        ("GEMMA_4", "gemma4", {"<|tool_call>", "<tool_call|>", '<|"|>'}, None, False),
        (
            "GPT_OSS",
            "harmony",
            {"<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"},
            ("<|channel|>analysis<|message|>", "<|end|>"),
            False,
        ),
    ],
)
def test_families_of_models(
    family: str,
    dialect: str | None,
    marks: set[str],
    thinking: tuple[str, str] | None,
    begins_thinking: bool,
) -> None:
    found = shown(getattr(chat_templates, family))
    assert found.tool_dialect == dialect
    assert found.tool_marks == marks
    assert found.thinking == thinking
    assert found.begins_thinking is begins_thinking


def test_a_section_that_the_prompt_has_closed() -> None:
    assert shown(chat_templates.QWEN3, enable_thinking=True).thinking == THINK
    assert shown(chat_templates.GEMMA_4, enable_thinking=True).thinking is not None
    begun = shown(chat_templates.EXAONE_4, enable_thinking=True)
    assert begun.thinking == THINK and begun.begins_thinking
    assert shown(chat_templates.COMMAND_A_REASONING, reasoning=False).thinking is None
    closed = shown(chat_templates.QWEN3, enable_thinking=False)
    assert closed.thinking is None
    assert not closed.begins_thinking


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("QWEN3", {"enable_thinking"}),
        ("QWEN2_5", set()),
        ("GPT_OSS", {"reasoning_effort"}),
        ("MISTRAL_WITH_EFFORT", {"reasoning_effort"}),
        ("LLAMA_3_2", {"custom_tools", "tools_in_user_message", "date_string"}),
    ],
)
def test_variables_that_a_template_reads(family: str, own: set[str]) -> None:
    """Names that a template itself sets in one of several branches may be among them."""
    switches = {"enable_thinking", "thinking", "reasoning_effort", "documents"}
    variables = shown(getattr(chat_templates, family)).variables
    assert variables >= {"messages", "tools", *own}
    assert not variables & (switches - own)


def test_comments_and_functions_are_not_what_a_template_shows() -> None:
    source = "{# <tool_call> '\"arguments\"' </think> #}{{ tools }}{{ raise_exception or range }}"
    found = shown(source)
    assert (found.tool_dialect, found.thinking) == (None, None)
    assert found.variables == {"tools"}


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("QWEN3_CODER", "<parameter="),
        ("QWEN3_CODER", "<tool_call>"),
        ("GEMMA_4", "<tool_call|>"),
        ("GEMMA_4", '<|"|>'),
    ],
)
def test_calls_in_another_form_are_of_no_known_dialect(family: str, missing: str) -> None:
    source = getattr(chat_templates, family).replace(missing, "<other>")
    assert shown(source).tool_dialect is None


def test_calls_like_nemotrons_with_other_members_are_not_taken_for_llamas() -> None:
    source = chat_templates.LLAMA_3_2 + "{{ '<TOOLCALL>' }}"
    assert '"arguments"' not in source
    assert shown(source).tool_dialect is None


def test_a_template_that_mentions_calls_and_takes_no_tools() -> None:
    assert shown('{{ messages[0].content }} <tool_call> "arguments"').tool_dialect is None


def test_the_chat_format_is_sent_to_clients_as_json() -> None:
    told = json.loads(shown(chat_templates.MISTRAL_V11).to_json())
    assert told == {
        "tool_dialect": "mistral",
        "tool_marks": ["[ARGS]", "[CALL_ID]", "[TOOL_CALLS]"],
        "thinking": None,
        "begins_thinking": False,
        "variables": ["bos_token", "eos_token", "messages", "tools"],
    }
    assert json.loads(shown(chat_templates.QWEN3).to_json())["thinking"] == list(THINK)


# --- with a tokenizer ----------------------------------------------------------------------------

GRAMMAR = Grammar(GrammarKind.REGEX, "[a-z]+")
SAMPLING = SamplingParams(grammar=GRAMMAR)


def encoder_of(path: Path, template: Any, *added: str) -> PromptEncoder:
    tokenizer = vocabularies.byte_level()
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "chat_template": template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return PromptEncoder.load(path)


def chat(**more: Any) -> MessagesPrompt:
    return MessagesPrompt(json.dumps([{"role": "user", "content": "<think>"}]), **more)


def test_the_dialect_is_that_of_the_template_for_tools(tmp_path: Path) -> None:
    """Even for a chat without tools, which the other template renders."""
    templates = [
        {"name": "default", "template": chat_templates.HERMES_3},
        {"name": "tool_use", "template": chat_templates.HERMES_3_TOOL_USE},
    ]
    encoder = encoder_of(tmp_path, templates)
    without = encoder.render_chat(chat())
    assert "<tools>" not in without.text
    assert without.format.tool_dialect == "hermes"
    with_tools = encoder.render_chat(chat(tools=json.dumps(TOOLS)))
    assert "<tools>" in with_tools.text
    assert with_tools.format.tool_dialect == "hermes"


@pytest.mark.parametrize(
    ("template", "variables", "begins_after", "opened_by"),
    [
        (chat_templates.QWEN3, {}, "</think>", "<think>"),
        (chat_templates.QWEN3, {"enable_thinking": False}, None, None),
        (chat_templates.QWEN3_THINKING, {}, "</think>", None),
        (chat_templates.QWEN2_5, {}, None, None),
        (chat_templates.MAGISTRAL, {}, None, None),  # whose marks this tokenizer does not know
    ],
)
def test_a_grammar_begins_after_thoughts(
    tmp_path: Path,
    template: str,
    variables: dict[str, Any],
    begins_after: str | None,
    opened_by: str | None,
) -> None:
    encoder = encoder_of(tmp_path, template, "</think>")
    names = list(encoder.vocabulary.names)
    prompt = encoder.rendered(chat(variables=json.dumps(variables)))
    grammar = encoder.after_thinking(SAMPLING, prompt).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (GRAMMAR.kind, GRAMMAR.source)
    assert grammar.begins_after == (None if begins_after is None else names.index(begins_after))
    assert grammar.opened_by == (None if opened_by is None else names.index(opened_by))
    assert encoder.after_thinking(SamplingParams(), prompt) == SamplingParams()


def test_a_grammar_of_an_answer_in_channels(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, chat_templates.GPT_OSS)
    prompt = encoder.rendered(chat())
    assert encoder.after_thinking(SAMPLING, prompt).grammar == replace(GRAMMAR, channels=True)
    finished = encoder.rendered(chat(add_generation_prompt=False))
    assert encoder.after_thinking(SAMPLING, finished) == SAMPLING


def test_only_chats_have_thoughts(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, chat_templates.QWEN3_THINKING, "</think>")
    prompt = encoder.rendered(TextPrompt("a<think>\n", parse_special_tokens=True))
    assert not isinstance(prompt, RenderedChat)
    assert encoder.after_thinking(SAMPLING, prompt) == SAMPLING


def test_the_end_of_a_section_that_has_begun_must_be_a_token(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, chat_templates.QWEN3_THINKING)
    prompt = encoder.rendered(chat())
    with pytest.raises(Unsupported, match="needs </think> to be one token of the tokenizer"):
        encoder.after_thinking(SAMPLING, prompt)
    assert encoder.after_thinking(SamplingParams(), prompt) == SamplingParams()
