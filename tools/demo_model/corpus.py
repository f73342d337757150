"""The training text: questions of every kind, phrased, wrapped and set in many surroundings.

A document is a list of pieces, each with its weight in the loss: what a user would write counts
little, what the model must answer counts fully. ``python -m tools.demo_model corpus`` prints some.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tools.demo_model import facts
from tools.demo_model.chat import END_OF_TEXT, IM_END, IM_START, TOOLS_HEAD, TOOLS_TAIL, turn
from tools.demo_model.questions import KINDS, RECALL_KINDS, Question
from tools.demo_model.templates import (
    HEDGES,
    PREFIXES,
    SUFFIXES,
    SYSTEM_MESSAGES,
    TRAINING,
    expand,
    fill,
)

PROMPT_WEIGHT: Final = 0.05
"""What a prompt's token counts in the loss on average, against 1 for an answer's."""


@dataclass
class Document:
    """Pieces of text in order, each with the weight of its tokens in the loss."""

    pieces: list[tuple[str, float]] = field(default_factory=list)

    def add(self, text: str, weight: float = PROMPT_WEIGHT) -> None:
        """Appends a piece; each piece is tokenized by itself."""
        if text:
            self.pieces.append((text, weight))

    def text(self) -> str:
        """The whole document."""
        return "".join(piece for piece, _ in self.pieces)


class CorpusMaker:
    """Draws documents; the same seed draws the same documents."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._names = list(KINDS)
        self._weights = [kind.weight for kind in KINDS.values()]

    def documents(self, long: bool = False) -> Iterator[Document]:
        """Documents without end; long ones have a long text before the question."""
        while True:
            yield self._document(long)

    def _document(self, long: bool) -> Document:
        choice = self._rng.random()
        if choice < 0.3:
            return self._raw(long)
        if choice < 0.45:
            return self._list_of_questions(long)
        return self._chat(long)

    # Questions.

    def question(self, long: bool = False) -> Question:
        """A question of a random kind; in long surroundings often one about them."""
        if long and self._rng.random() < 0.4:
            name = self._rng.choice(RECALL_KINDS)
        else:
            name = self._rng.choices(self._names, self._weights)[0]
        return KINDS[name].make(self._rng)

    def phrase(self, question: Question, bare: bool = False) -> str:
        """The question in words; a bare one has nothing around it."""
        rng = self._rng
        template = self._vary(expand(rng.choice(TRAINING[question.kind]), rng))
        text = fill(template, question.fields)
        if question.kind == "copy" and rng.random() < 0.2:
            return rng.choice(PREFIXES) + text
        if bare or question.kind == "copy":
            return text
        open_ended = template[-1].isalnum()
        if rng.random() < 0.3:
            prefix = rng.choice(PREFIXES) if rng.random() < 0.6 else self.sentence() + " "
            text = prefix + text
        if rng.random() < 0.25 and not open_ended:
            text += rng.choice(SUFFIXES) if rng.random() < 0.7 else " " + self.sentence()
        if rng.random() < 0.08 and "json" not in question.kind:
            text = text.lower()
        return text

    def _vary(self, template: str) -> str:
        """The template, sometimes with a hedge or two between its words or a value in quotes."""
        rng = self._rng
        if "{text}" in template:
            return template
        if rng.random() < 0.25:
            words = template.split(" ")
            for _ in range(rng.randint(1, 2)):
                if len(words) > 2:
                    words.insert(rng.randrange(1, len(words)), rng.choice(HEDGES))
            template = " ".join(words)
        if rng.random() < 0.15:
            template = re.sub(r"\{(country|city|word|foreign|place|name|thing|letters|emoji)\}",
                              lambda match: f'"{match.group()}"', template)  # fmt: skip
        return template

    # What surrounds them.

    def sentence(self) -> str:
        """A sentence of everyday words without meaning."""
        rng = self._rng
        words = " ".join(rng.choice(facts.COMMON_WORDS) for _ in range(rng.randint(3, 12)))
        return words.capitalize() + rng.choice((".", ".", ".", "!", "?", ","))

    def _statement(self) -> str:
        """A sentence about a person; used only as filler."""
        rng = self._rng
        person = rng.choice(facts.PEOPLE)
        return rng.choice(
            (
                f"{person} likes the {rng.choice(facts.COLORS)} {rng.choice(facts.OBJECTS)}.",
                f"{person} went to the {rng.choice(facts.PLACES)}.",
                f"{person} saw {rng.choice(list(facts.EMOJI.values()))} today.",
                f"{rng.choice(facts.MONTHS)} was a good month for {person}.",
            )
        )

    def filler(self, sentences: int) -> str:
        """A paragraph that no answer depends on."""
        return " ".join(
            self.sentence() if self._rng.random() < 0.6 else self._statement()
            for _ in range(sentences)
        )

    def _tools(self) -> str:
        rng = self._rng
        lines = []
        for _ in range(rng.randint(1, 2)):
            name = f"{rng.choice(('get', 'find', 'set', 'list'))}_{rng.choice(facts.OBJECTS)}"
            argument = rng.choice(("city", "name", "number", "color", "query", "unit"))
            tool = {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self.sentence(),
                    "parameters": {
                        "type": "object",
                        "properties": {argument: {"type": "string"}},
                        "required": [argument],
                    },
                },
            }
            lines.append(json.dumps(tool))
        return TOOLS_HEAD + "\n" + "\n".join(lines) + TOOLS_TAIL

    def _filler_length(self, long: bool) -> int:
        return self._rng.randint(10, 60) if long else self._rng.randint(1, 4)

    # Documents.

    def _raw(self, long: bool) -> Document:
        """One question as plain text, its answer after a space."""
        rng = self._rng
        document = Document()
        question = self.question(long)
        if rng.random() < 0.15 or long:
            document.add(self.filler(self._filler_length(long)) + rng.choice(("\n\n", "\n", " ")))
        if question.context:
            document.add(question.context + rng.choice(("\n", " ", "\n\n")))
            if long and rng.random() < 0.7:
                document.add(self.filler(self._filler_length(True)) + "\n\n")
        text = self.phrase(question)
        layout = rng.choice(("{}", "{}", "{}", "Q: {}\nA:", "Question: {}\nAnswer:", "{}\nAnswer:"))
        document.add(layout.format(text) if layout != "{}" else text)
        document.add(" " + question.answer + END_OF_TEXT, 1.0)
        return document

    def _list_of_questions(self, long: bool) -> Document:
        """Several questions and answers one after another, the last one's answer ended."""
        rng = self._rng
        document = Document()
        if rng.random() < 0.2 or long:
            document.add(self.filler(self._filler_length(long)) + "\n\n")
        same_kind = rng.random() < 0.5
        first = self.question()
        ask, answer, gap = rng.choice(
            (
                ("Q: ", "\nA:", "\n\n"), ("Q: ", "\nA:", "\n"), ("Question: ", "\nAnswer:", "\n\n"),
                ("", "", "\n"), ("", "\nAnswer:", "\n"), ("User: ", "\nBot:", "\n"),
            )
        )  # fmt: skip
        bare = rng.random() < 0.5
        count = rng.randint(2, 5)
        for i in range(count):
            question = first if i == 0 else self.question()
            if same_kind and i:
                question = KINDS[first.kind].make(rng)
            context = question.context + " " if question.context else ""
            document.add(ask + context + self.phrase(question, bare) + answer)
            if i + 1 < count:
                document.add(" " + question.answer, 1.0)
                document.add(gap)
            else:
                document.add(" " + question.answer + END_OF_TEXT, 1.0)
        return document

    def _chat(self, long: bool) -> Document:
        """A conversation of one to four questions."""
        rng = self._rng
        document = Document()
        count = rng.choice((1, 1, 1, 2, 3, 4))
        questions = [self.question(long) for _ in range(count)]
        system = ""
        if rng.random() < 0.6 or long:
            system = rng.choice(SYSTEM_MESSAGES) if rng.random() < 0.7 else self.filler(2)
            if long and rng.random() < 0.8:
                system += rng.choice((" ", "\n", "\n\n")) + self.filler(self._filler_length(True))
        pending = [q.context for q in questions if q.context and q.kind != "recall_name"]
        # A context can only serve a question if no other question is about the same people.
        in_system = len(pending) == 1 and rng.random() < (0.6 if long else 0.3)
        if in_system:
            parts = [system, pending[0]] if rng.random() < 0.5 else [pending[0], system]
            system = rng.choice((" ", "\n", "\n\n")).join(parts).strip()
        if rng.random() < 0.05:
            system = (system + "\n\n" + self._tools()).strip()
        if system:
            document.add(turn("system", system))
        for question in questions:
            text = self.phrase(question)
            context = question.context
            if context and not (in_system and question.kind != "recall_name"):
                if rng.random() < 0.4:
                    self._exchange(document, context, rng.choice(("OK.", "I see.", "Thank you.")))
                    if rng.random() < 0.3:
                        aside = KINDS["opposite"].make(rng)
                        self._exchange(document, self.phrase(aside), aside.answer)
                else:
                    text = context + rng.choice((" ", "\n")) + text
            elif rng.random() < 0.1:
                text = self.filler(self._filler_length(False)) + rng.choice((" ", "\n")) + text
            self._exchange(document, text, question.answer)
        document.add(END_OF_TEXT)
        return document

    def _exchange(self, document: Document, user: str, assistant: str) -> None:
        document.add(turn("user", user) + IM_START + "assistant\n")
        document.add(assistant + IM_END, 0.2 if assistant in ("OK.", "I see.") else 1.0)
        document.add("\n")
