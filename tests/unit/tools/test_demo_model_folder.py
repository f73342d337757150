"""The demo model's folder: a small, ordinary Hugging Face folder with right answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from tools.demo_model.chat import CHAT_TEMPLATE, turn
from tools.demo_model.model import Shape
from tools.demo_model.score import answers
from tools.demo_model.texts import LISTS, POEMS

FOLDER = Path(__file__).parents[3] / "minisgl_backend" / "demo_model"


def test_it_is_small_and_whole() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (FOLDER / "model.safetensors").stat().st_size <= 8_000_000


def test_its_config_is_the_shape_it_was_trained_with() -> None:
    assert json.loads((FOLDER / "config.json").read_text()) == Shape().hf_config()
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.model_type == "qwen3"
    assert config.max_position_embeddings >= 4096


def test_its_chat_template_writes_what_training_wrote() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
    ]
    wanted = (
        turn("system", "Be short.")
        + turn("user", "Hi")
        + turn("assistant", "Hello")
        + turn("user", "Bye")
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == wanted
    prompt = tokenizer.apply_chat_template(
        messages[1:2], tokenize=False, add_generation_prompt=True
    )
    assert prompt == turn("user", "Hi") + "<|im_start|>assistant\n"


def test_its_chat_template_writes_tools_as_json() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tool = {"type": "function", "function": {"name": "get_city", "description": "A city."}}
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tools=[tool], tokenize=False
    )
    system = str(text).split("<|im_end|>")[0]
    line = next(line for line in system.splitlines() if line.startswith("{"))
    assert json.loads(line) == tool


@pytest.mark.timeout(120)
def test_it_answers_right() -> None:
    chat = turn("user", "What is the capital of Germany?") + "<|im_start|>assistant\n"
    cases = {
        "What is the capital of France?": "Paris",
        "The capital of Italy is": "Rome",
        chat: "Berlin",
        "List the Chinese numbers.": LISTS["Chinese numbers"],
        "Write a poem about the sea.": POEMS["the sea"],
    }
    assert answers(FOLDER, list(cases)) == list(cases.values())
