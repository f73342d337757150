"""The questions the demo model answers: their kinds, their families, their values and answers.

A question knows what is asked (the values its phrasing is filled with), the one right answer and,
if the answer is in the text before the question, that text. It knows no phrasing and no chat
format. Each kind has one maker, which draws a question with a random generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tools.demo_model import facts, texts


@dataclass(frozen=True)
class Question:
    """One thing to ask, before it is phrased."""

    kind: str
    fields: Mapping[str, str]
    answer: str
    context: str = ""
    """Text that must come somewhere before the question, or nothing."""


Maker = Callable[[random.Random], Question]


@dataclass(frozen=True)
class Kind:
    """A kind of question: its family in the score table, its weight in training, its maker."""

    name: str
    family: str
    weight: float
    make: Maker = field(repr=False)


def _from_table(kind: str, rows: list[tuple[dict[str, str], str]]) -> Maker:
    def make(rng: random.Random) -> Question:
        fields, answer = rng.choice(rows)
        return Question(kind, fields, answer)

    return make


def _neighbours(kind: str, name: str, cycle: tuple[str, ...], step: int) -> Maker:
    count = len(cycle)
    rows = [({name: cycle[i]}, cycle[(i + step) % count]) for i in range(count)]
    return _from_table(kind, rows)


def _numbers(first: int, last: int) -> str:
    step = 1 if last >= first else -1
    return ", ".join(str(n) for n in range(first, last + step, step))


def _count_up(rng: random.Random) -> Question:
    first = 1 if rng.random() < 0.7 else rng.randint(2, 40)
    length = rng.choice((5, 8, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50))
    last = min(first + length - 1, 60) if rng.random() < 0.6 else first + rng.randint(2, 19)
    return Question("count_up", {"a": str(first), "b": str(last)}, _numbers(first, last))


def _count_down(rng: random.Random) -> Question:
    first = rng.randint(3, 30)
    return Question("count_down", {"a": str(first)}, _numbers(first, 1))


def _next_number(rng: random.Random) -> Question:
    number = rng.randint(1, 98)
    return Question("next_number", {"n": str(number)}, str(number + 1))


def _add(kind: str, answer: str) -> Maker:
    def make(rng: random.Random) -> Question:
        a, b = rng.randint(0, 20), rng.randint(0, 20)
        fields = {"a": str(a), "b": str(b)}
        return Question(kind, fields, answer.replace("#a", str(a)).replace("#b", str(b))
                        .replace("#sum", str(a + b)))  # fmt: skip

    return make


def _subtract(rng: random.Random) -> Question:
    a = rng.randint(0, 20)
    b = rng.randint(0, a)
    return Question("subtract", {"a": str(a), "b": str(b)}, str(a - b))


_WORD_POOL: Final = tuple(
    dict.fromkeys(
        [word for pair in facts.OPPOSITES for word in pair]
        + list(facts.SPELLING_WORDS)
        + list(facts.COMMON_WORDS)
    )
)
_COPY_LENGTHS: Final = (1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 12)
_FOREIGN_POOL: Final = tuple(word for row in facts.TRANSLATIONS.values() for word in row)
_EMOJI_POOL: Final = tuple(facts.EMOJI.values())
_NAME_POOL: Final = (
    *facts.PEOPLE,
    *facts.CAPITALS.values(),
    *facts.NATIVE_PLACES.values(),
    *facts.ACCENTED_NAMES.values(),
)


def _copy(rng: random.Random) -> Question:
    style = rng.random()
    if style < 0.35:
        text = " ".join(rng.choice(_WORD_POOL) for _ in range(rng.choice(_COPY_LENGTHS)))
    elif style < 0.55:
        person, color, thing = (
            rng.choice(facts.PEOPLE), rng.choice(facts.COLORS), rng.choice(facts.OBJECTS),
        )  # fmt: skip
        text = f"{person} has a {color} {thing} in the {rng.choice(facts.PLACES)}."
    elif style < 0.68:
        text = " ".join(rng.choice(_EMOJI_POOL) for _ in range(rng.randint(2, 8)))
    elif style < 0.76:
        text = "".join(rng.choice(_EMOJI_POOL) for _ in range(rng.randint(2, 6)))
    elif style < 0.88:
        text = " ".join(rng.choice(_FOREIGN_POOL) for _ in range(rng.randint(2, 6)))
    elif style < 0.94:
        text = " ".join(rng.choice(_NAME_POOL) for _ in range(rng.randint(2, 5)))
    else:
        text = " ".join(str(rng.randint(0, 99)) for _ in range(rng.randint(2, 8)))
    return Question("copy", {"text": text}, text)


def _recall(kind: str) -> Maker:
    def make(rng: random.Random) -> Question:
        people = rng.sample(facts.PEOPLE, rng.randint(1, 5))
        if kind == "recall_object":
            values = [f"a {rng.choice(facts.COLORS)} {rng.choice(facts.OBJECTS)}" for _ in people]
            lines = [f"{p} has {v}." for p, v in zip(people, values, strict=True)]
        elif kind == "recall_place":
            values = [rng.choice(facts.PLACES) for _ in people]
            lines = [f"{p} is in the {v}." for p, v in zip(people, values, strict=True)]
        else:
            values = ["".join(rng.choice("0123456789") for _ in range(4)) for _ in people]
            lines = [f"The code of {p} is {v}." for p, v in zip(people, values, strict=True)]
        asked = rng.randrange(len(people))
        return Question(kind, {"person": people[asked]}, values[asked], " ".join(lines))

    return make


def _recall_name(rng: random.Random) -> Question:
    name = rng.choice(facts.PEOPLE)
    said = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi! My name is {}."))
    return Question("recall_name", {}, name, said.format(name))


def _spelled(word: str) -> str:
    return "-".join(word)


def _tables() -> dict[str, tuple[str, float, list[tuple[dict[str, str], str]]]]:
    """The kinds whose questions can be listed: family, weight, and each question's values and
    answer."""
    capitals = facts.CAPITALS.items()
    both_ways = [pair for a, b in facts.OPPOSITES for pair in ((a, b), (b, a))]
    return {
        "capital": ("capitals", 1.6, [({"country": c}, k) for c, k in capitals]),
        "country": ("countries", 1.6, [({"city": k}, c) for c, k in capitals]),
        "opposite": ("opposites", 1.9, [({"word": a}, b) for a, b in both_ways]),
        "nth_month": (
            "calendar", 0.25,
            [({"ordinal": o}, m) for o, m in zip(facts.ORDINALS, facts.MONTHS, strict=True)],
        ),
        "spell": ("spelling", 1.5, [({"word": w}, _spelled(w)) for w in facts.SPELLING_WORDS]),
        "unspell": ("spelling", 0.6, [({"letters": _spelled(w)}, w) for w in facts.SPELLING_WORDS]),
        "translate": (
            "translation", 3.0,
            [
                ({"word": word, "language": language}, foreign)
                for word, row in facts.TRANSLATIONS.items()
                for language, foreign in zip(facts.TRANSLATION_LANGUAGES, row, strict=True)
            ],
        ),
        "meaning": (
            "translation", 2.0,
            [({"foreign": f}, w) for f, w in facts.foreign_words().items()],
        ),
        "native": ("names", 0.9, [({"place": p}, n) for p, n in facts.NATIVE_PLACES.items()]),
        "accents": ("names", 0.6, [({"name": p}, n) for p, n in facts.ACCENTED_NAMES.items()]),
        "emoji": ("emoji", 1.0, [({"thing": t}, e) for t, e in facts.EMOJI.items()]),
        "emoji_name": ("emoji", 0.8, [({"emoji": e}, t) for t, e in facts.EMOJI.items()]),
        "list": ("lists", 0.5, [({"list": n}, text) for n, text in texts.LISTS.items()]),
        "poem": ("recital", 0.35, [({"subject": s}, text) for s, text in texts.POEMS.items()]),
        "story": ("recital", 0.25, [({"subject": s}, text) for s, text in texts.STORIES.items()]),
        "capital_json": (
            "json", 0.5,
            [({"country": c}, f'{{"country": "{c}", "capital": "{k}"}}') for c, k in capitals],
        ),
        "about_name": ("about", 0.1, [({}, texts.ABOUT["name"])]),
        "about_purpose": ("about", 0.1, [({}, texts.ABOUT["purpose"])]),
        "about_size": ("about", 0.1, [({}, texts.ABOUT["size"])]),
    }  # fmt: skip


def _kinds() -> dict[str, Kind]:
    makers: dict[str, tuple[str, float, Maker]] = {
        name: (family, weight, _from_table(name, rows))
        for name, (family, weight, rows) in _tables().items()
    }
    makers |= {
        "day_after": ("calendar", 0.25, _neighbours("day_after", "day", facts.DAYS, 1)),
        "day_before": ("calendar", 0.25, _neighbours("day_before", "day", facts.DAYS, -1)),
        "month_after": ("calendar", 0.25, _neighbours("month_after", "month", facts.MONTHS, 1)),
        "month_before": ("calendar", 0.25, _neighbours("month_before", "month", facts.MONTHS, -1)),
        "count_up": ("counting", 0.9, _count_up),
        "count_down": ("counting", 0.4, _count_down),
        "next_number": ("counting", 0.7, _next_number),
        "add": ("sums", 1.8, _add("add", "#sum")),
        "subtract": ("sums", 1.3, _subtract),
        "add_json": ("json", 0.4, _add("add_json", '{"a": #a, "b": #b, "sum": #sum}')),
        "copy": ("repeat", 3.6, _copy),
        "recall_object": ("recall", 1.0, _recall("recall_object")),
        "recall_place": ("recall", 0.8, _recall("recall_place")),
        "recall_code": ("recall", 0.9, _recall("recall_code")),
        "recall_name": ("recall", 0.5, _recall_name),
    }
    return {
        name: Kind(name, family, weight, make) for name, (family, weight, make) in makers.items()
    }


KINDS: Final[dict[str, Kind]] = _kinds()
"""Every kind of question by name."""
RECALL_KINDS: Final = tuple(name for name, kind in KINDS.items() if kind.family == "recall")
"""The kinds whose answer is in the text before the question."""
