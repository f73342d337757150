"""Scores the demo model on phrasings it has never seen, with transformers' own Qwen3.

The phrasings are in ``heldout_templates.json``. Every question is asked as plain text, as a chat
message or inside a longer text or conversation; the greedy answer must equal the right one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tools.demo_model.corpus import CorpusMaker
from tools.demo_model.questions import KINDS, Question
from tools.demo_model.templates import fill

HELDOUT: Final = Path(__file__).with_name("heldout_templates.json")
BAR_TOTAL: Final = 0.95
BAR_FAMILY: Final = 0.85
SETTINGS: Final = ("plain", "chat", "after other questions", "after a long text")
PER_FAMILY: Final = 60


@dataclass(frozen=True)
class HeldoutPrompt:
    """A question as the model gets it."""

    question: Question
    setting: str
    prompt: str


def heldout_templates() -> dict[str, list[str]]:
    """The phrasings of the committed file, by kind of question."""
    templates: dict[str, list[str]] = json.loads(HELDOUT.read_text(encoding="utf-8"))
    return templates


def heldout_questions(seed: int = 7) -> Iterator[tuple[Question, str, str]]:
    """The questions of the score, each with its wording and setting: PER_FAMILY of each family."""
    rng = random.Random(seed)
    templates = heldout_templates()
    families: dict[str, list[str]] = {}
    for kind in KINDS.values():
        families.setdefault(kind.family, []).append(kind.name)
    for kinds in families.values():
        seen: set[str] = set()
        for i in range(PER_FAMILY * 4):
            kind_name = kinds[i % len(kinds)]
            question = KINDS[kind_name].make(rng)
            text = fill(rng.choice(templates[kind_name]), question.fields)
            setting = rng.choice(SETTINGS)
            whole = setting + question.context + text
            if whole in seen or len(seen) == PER_FAMILY:
                continue
            seen.add(whole)
            yield question, text, setting


def heldout_prompts(tokenizer: PreTrainedTokenizerBase, seed: int = 7) -> list[HeldoutPrompt]:
    """The prompts of the score."""
    filler, rng = CorpusMaker(seed), random.Random(seed)
    result = []
    for question, text, setting in heldout_questions(seed):
        context = f"{question.context}\n" if question.context else ""
        if setting != "after a long text":
            text = context + text
        messages = [{"role": "user", "content": text}]
        if setting == "after other questions":
            messages = [
                {"role": "user", "content": "What is 2 + 2?"},
                {"role": "assistant", "content": "4"},
                {"role": "user", "content": "The opposite of hot is"},
                {"role": "assistant", "content": "cold"},
                *messages,
            ]
        elif setting == "after a long text":
            long_text = context + filler.filler(rng.choice((15, 40, 80, 160)))
            system = {"role": "system", "content": long_text}
            messages = [system, *messages]
        prompt = text if rng.random() < 0.5 else f"Q: {text}\nA:"
        if setting != "plain":
            chat = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            prompt = str(chat)
        result.append(HeldoutPrompt(question, setting, prompt))
    return result


def answers(folder: Path, prompts: list[str], device: str = "cpu", batch: int = 64) -> list[str]:
    """The model's greedy answers, without white space at either end."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(device)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    result = [""] * len(prompts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
        with torch.inference_mode():
            output = model.generate(**inputs.to(device), max_new_tokens=320, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            result[i] = text.strip()
    return result


def score(folder: Path, device: str = "cpu", show_wrong: int = 40) -> bool:
    """Prints the table and some wrong answers; returns whether the model meets the bar."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    questions = heldout_prompts(tokenizer)
    given = answers(folder, [a.prompt for a in questions], device)
    right = [text == a.question.answer for a, text in zip(questions, given, strict=True)]
    console = Console(width=100)
    is_good = True
    groups = {
        "Family": [KINDS[a.question.kind].family for a in questions],
        "Setting": [a.setting for a in questions],
    }
    for title, names in groups.items():
        table = Table(title, "Questions", "Right", "Share")
        for name in [*dict.fromkeys(names), "total"]:
            marks = [mark for mark, n in zip(right, names, strict=True) if name in (n, "total")]
            share = sum(marks) / len(marks)
            table.add_row(name, str(len(marks)), str(sum(marks)), f"{share:.1%}")
            if title == "Family":
                is_good &= share >= (BAR_TOTAL if name == "total" else BAR_FAMILY)
        console.print(table)
    wrong = [(a, t) for a, t, mark in zip(questions, given, right, strict=True) if not mark]
    for case, text in wrong[:show_wrong]:
        console.print(
            f"{case.setting}: {case.prompt[-120:]!r}\n  gave  {text[:80]!r}"
            f"\n  right {case.question.answer[:80]!r}",
            markup=False,
        )
    console.print("The bar is met." if is_good else "The bar is NOT met.")
    return is_good
