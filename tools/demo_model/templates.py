"""The phrasings that training uses, by kind of question, and what may come around them.

They are in ``training_templates.json``. A phrasing is text with two marks: ``{field}`` stands for a
value of the question, and ``[a|b|c]`` for one of the alternatives, any of which may be empty;
brackets do not nest. The phrasings that scoring uses are in ``heldout_templates.json``, which
nothing here opens.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_CHOICE: Final = re.compile(r"\[([^\[\]]*)\]")
_SPACES: Final = re.compile(r"  +")


def expand(template: str, rng: random.Random) -> str:
    """One random reading of the template's alternatives, its fields still in place."""
    text = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    return _SPACES.sub(" ", text).strip()


def fill(template: str, fields: Mapping[str, str]) -> str:
    """The template with its fields' values; a value's own braces stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda match: fields[match.group(1)], template)


def _read(name: str) -> dict[str, tuple[str, ...]]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return {kind: tuple(phrasings) for kind, phrasings in json.loads(text).items()}


TRAINING: Final = _read("training_templates.json")
"""Kind of question to the phrasings of it that training may use."""

PREFIXES: Final = (
    "Please tell me: ", "Quick question: ", "Question: ", "Hello! ", "Hi! ", "Hi there. ", "Hey, ",
    "I have a question. ", "One more thing: ", "Now, ", "Next question. ", "OK, ", "Thanks. ",
    "Good morning! ", "Help me, please. ", "Just curious: ", "For a test: ", "By the way, ",
    "Let me ask you something. ", "So, ", "Well, ", "An easy one: ", "Here is a question for you: ",
    "I am doing my homework. ", "We are playing a quiz. ", "Think about it: ", "Once again: ",
    "Would you say ", "Would you explain ", "Will you tell us ", "May I ask ", "I hope you recall ",
    "Would you check ", "I wish to hear ", "Can you help me recall ", "It is time to say ",
    "I was asked this: ", "From memory: ", "Can you recall? ", "Remember: ", "A friend asks: ",
    "I always forget this. ", "My sister wants to know: ", "Try this one. ", "Do this: ",
    "Be so kind and answer this. ", "Excuse me, ", "Tell me, ", "Please, ", "Dear model, ",
)  # fmt: skip
HEDGES: Final = (
    "really", "just", "exactly", "now", "please", "maybe", "again", "actually", "then", "simply",
    "also", "perhaps", "of course", "in fact", "you know", "for me", "for us", "today", "quickly",
    "would", "could", "should", "must", "please now", "kindly", "once", "well", "still", "here",
    "there", "only", "even", "I think", "it seems", "as you know", "to be sure", "say", "right now",
)  # fmt: skip
"""Words that may be nearly anywhere in a question without changing its answer."""
SUFFIXES: Final = (
    " Please.", " Thanks!", " Thank you.", " Answer briefly.", " Only the answer, please.",
    " I need to know.", " Be short.", " Just the answer.", " No more words.", " Tell me now.",
    " I forgot.", " Answer with care.", " It is for a test.", " Be quick!", " Please answer.",
    " I am not sure.", " It would help me.", " That is all.", " I am curious.", " Don't guess.",
)  # fmt: skip
SYSTEM_MESSAGES: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are MiniSGL's demo model.",
    "Answer the user's questions.",
    "Be short and correct.",
    "You answer simple questions about the world.",
    "You are a teacher. Give only the answer.",
    "You are a friendly bot.",
    "Answer with as few words as you can.",
    "You are a quiz master who knows all the answers.",
)
