"""The demo model's training text: what it may contain, and what it must not."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product

import pytest
from tokenizers import Tokenizer

from tools.demo_model import facts, score, templates
from tools.demo_model.batches import BatchMaker
from tools.demo_model.chat import SPECIAL_TOKENS
from tools.demo_model.corpus import CorpusMaker, Document
from tools.demo_model.questions import KINDS
from tools.demo_model.tokenizer import train_tokenizer


def _plain(text: str) -> str:
    """The text without case, outer punctuation and runs of white space."""
    return re.sub(r"\s+", " ", text.lower()).strip(" ?.!:")


def _expansions(template: str) -> Iterator[str]:
    """Every reading of the template's alternatives, its fields still in place."""
    parts = re.split(r"\[([^\[\]]*)\]", template)
    options = [part.split("|") if i % 2 else [part] for i, part in enumerate(parts)]
    for combination in product(*options):
        yield re.sub("  +", " ", "".join(combination)).strip()


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return list(islice(CorpusMaker(20).documents(), 12_000))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(20, documents=4_000)


def test_every_kind_has_phrasings_for_training_and_for_scoring() -> None:
    heldout = score.heldout_templates()
    assert set(templates.TRAINING) == set(KINDS) == set(heldout)
    assert all(len(phrasings) >= 2 for phrasings in heldout.values())
    assert all(len(set(p)) == len(p) for p in templates.TRAINING.values())


def test_phrasings_name_only_fields_that_the_questions_have() -> None:
    rng = random.Random(3)
    heldout = score.heldout_templates()
    for name, kind in KINDS.items():
        question = kind.make(rng)
        for template in (*templates.TRAINING[name], *heldout[name]):
            assert set(re.findall(r"\{(\w+)\}", template)) == set(question.fields), template


def test_no_heldout_phrasing_is_a_training_phrasing() -> None:
    training = {
        _plain(expansion)
        for phrasings in templates.TRAINING.values()
        for phrasing in phrasings
        for expansion in _expansions(phrasing)
    }
    heldout = [_plain(t) for phrasings in score.heldout_templates().values() for t in phrasings]
    assert len(training) > 4_000
    assert not training.intersection(heldout)


def test_no_heldout_question_stands_in_the_training_text(documents: list[Document]) -> None:
    text = _plain("\n".join(document.text() for document in documents))
    questions = {_plain(text) for _, text, _ in score.heldout_questions()}
    assert len(questions) >= 500
    assert [question for question in questions if question in text] == []


def test_the_score_asks_enough_in_every_family_and_setting() -> None:
    asked = list(score.heldout_questions())
    families = Counter(KINDS[question.kind].family for question, _, _ in asked)
    settings = Counter(setting for _, _, setting in asked)
    assert len(asked) >= 500
    assert min(families.values()) >= 20
    assert set(settings) == set(score.SETTINGS)


def test_the_same_seed_makes_the_same_text() -> None:
    def text(seed: int) -> list[str]:
        return [document.text() for document in islice(CorpusMaker(seed).documents(), 50)]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_context_stands_before_its_question(documents: list[Document]) -> None:
    rng = random.Random(5)
    for name in ("recall_object", "recall_place", "recall_code", "recall_name"):
        question = KINDS[name].make(rng)
        assert question.answer in question.context


def test_answers_weigh_most(documents: list[Document]) -> None:
    for document in documents[:200]:
        assert max(weight for _, weight in document.pieces) == 1.0
        assert document.pieces[0][1] < 0.1


@pytest.mark.parametrize(
    ("kind", "fields", "answer"),
    [
        ("capital", {"country": "France"}, "Paris"),
        ("country", {"city": "Tokyo"}, "Japan"),
        ("opposite", {"word": "cold"}, "hot"),
        ("spell", {"word": "banana"}, "b-a-n-a-n-a"),
        ("translate", {"word": "cat", "language": "Chinese"}, "猫"),
        ("native", {"place": "Moscow"}, "Москва"),
        ("emoji", {"thing": "fox"}, "🦊"),
    ],
)
def test_the_tables_give_the_right_answers(kind: str, fields: dict[str, str], answer: str) -> None:
    rng = random.Random(0)
    drawn = (KINDS[kind].make(rng) for _ in range(20_000))
    assert next(q.answer for q in drawn if dict(q.fields) == fields) == answer


def test_no_fact_has_two_answers() -> None:
    assert len(set(facts.CAPITALS.values())) == len(facts.CAPITALS)
    assert len(set(facts.EMOJI.values())) == len(facts.EMOJI)
    words = [word for pair in facts.OPPOSITES for word in pair]
    assert len(set(words)) == len(words)
    assert all(len(r) == len(facts.TRANSLATION_LANGUAGES) for r in facts.TRANSLATIONS.values())


def test_expand_and_expansions_agree() -> None:
    template = "[a|b|] {x} [c|d]"
    every = set(_expansions(template))
    rng = random.Random(1)
    assert every == {"a {x} c", "a {x} d", "b {x} c", "b {x} d", "{x} c", "{x} d"}
    assert {templates.expand(template, rng) for _ in range(200)} == every
    assert templates.fill("{x} {y}", {"x": "{y}", "y": "1"}) == "{y} 1"


def test_the_tokenizer_keeps_every_text(tokenizer: Tokenizer, documents: list[Document]) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    for document in documents[:200]:
        ids = tokenizer.encode(document.text()).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == document.text()


def test_rare_characters_stay_spread_over_several_tokens(tokenizer: Tokenizer) -> None:
    characters = "猫東京고양이🐱🦊🌊あ漢"
    spread = [c for c in characters if len(tokenizer.encode(c).ids) > 1]
    assert len(spread) >= len(characters) - 2


def test_batches_have_their_shapes_and_jumps(tokenizer: Tokenizer) -> None:
    maker = BatchMaker(tokenizer, seed=1, tokens=2048, context=8192)
    batches = list(maker.batches(8))
    assert [tuple(b[0].shape) for b in batches[:4]] == [(8, 257)] * 3 + [(2, 1025)]
    steps = [int((b[1][:, 1:] - b[1][:, :-1]).max()) for b in batches]
    assert max(steps) > 100
    for tokens, positions, weights in batches:
        assert tokens.shape == positions.shape == weights.shape
        assert int((positions[:, 1:] - positions[:, :-1]).min()) == 1
        assert int(positions.max()) < 8192
