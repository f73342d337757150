"""Answers with a grammar are the same with guesses as without, at any temperature.

The engines are real ones with random weights. So the requests' grammars or biases make them repeat
themselves, or begin like their prompts, else there would be little to look up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

from minisgl_backend.build import build_engine_alone
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import EngineFailure
from minisgl_backend.execution.launched import MaskedStep
from minisgl_backend.grammar.matchers import Matcher
from minisgl_backend.parts import STANDARD
from minisgl_backend.plan import Pending, StepPlan
from minisgl_backend.request import (
    FinishReason,
    IntArray,
    Request,
    RequestId,
    SamplingParams,
    samples_of,
)
from minisgl_backend.runtime.constraints import Constraints
from minisgl_kit.wrappers import ExecutorWrapper
from tests.conformance.checkpoints import write_checkpoint
from tests.grammar.matching import EOS, VOCABULARY
from tests.grammar.test_engine import OPTIONS, PROMPT, SCHEMA, NotFinite, grammar, piece, text_of
from tests.grammar.test_lookahead import letters
from tests.parallel.engines import Answer, Ranked, ranked_engine, wait_for_all

GUESSING: Final[dict[str, Any]] = {"speculative_tokens": 6, "speculative_max_requests": 16}
RECORDS: Final = {
    "type": "array",
    "items": SCHEMA,
    "minItems": 4,
    "x-guidance": {"whitespace_flexible": False},
}
QUOTE: Final = tuple((token, 3.0) for token, text in enumerate(VOCABULARY.pieces) if text == b'"')
NO_END: Final = ((EOS, -90.0), (2, -90.0))
FREE: Final = (50, 51)
"""Tokens of a free section, which ``MARK`` ends."""
MARK: Final = 52
SECTIONS: Final = [
    token for three in product(FREE, repeat=3) for token in (*three, MARK, *letters("abab"))
]
"""After any three tokens of a free section it ends, and the grammar begins. A prompt ends with two
tokens more."""

Asked: TypeAlias = tuple[IntArray, SamplingParams]


def said(text: str) -> IntArray:
    """A prompt."""
    return np.array([40, 41, *letters(text)], np.int32)


def kinds() -> list[Asked]:
    """Grammars of all kinds, with rules of their own; and a request without."""
    return [
        (
            said('[{"name":"ab"'),
            SamplingParams(grammar=grammar("json_schema", RECORDS), logit_bias=QUOTE),
        ),
        (
            said("abcabcabc"),
            SamplingParams(grammar=grammar("regex", "(abc|abd)*"), logit_bias=NO_END),
        ),
        (said("abababab"), SamplingParams(grammar=grammar("regex", "[ab]{5,70}"), min_tokens=9)),
        (said("a,b"), SamplingParams(grammar=grammar("regex", "(a,){12}(x|y),(done|gone)"))),
        (said("ab"), SamplingParams(grammar=grammar("regex", "[ab]*"), ignore_eos=True)),
        (
            said("abc"),
            SamplingParams(
                grammar=grammar("regex", "[abc]*"),
                stop_token_ids=(piece("c"),),
                min_tokens=20,
                logit_bias=NO_END,
            ),
        ),
        (
            np.array([*SECTIONS, *FREE], np.int32),
            SamplingParams(
                grammar=grammar("regex", "(ab)*", begins_after=MARK),
                logit_bias=(*((token, 90.0) for token in FREE), (MARK, 90.7), *NO_END),
            ),
        ),
        (said("abab"), SamplingParams(logit_bias=((piece("a"), 99.0), (piece("b"), 99.0)))),
        (
            said("abcabcabc"),
            SamplingParams(
                grammar=grammar("regex", "(abc|abd|acd)*"),
                logit_bias=NO_END,
                repetition_penalty=1.1,
                presence_penalty=-0.5,
                frequency_penalty=0.2,
            ),
        ),
    ]


def requests() -> list[Asked]:
    """Greedy and random ones of each kind, and more with a free section."""
    prompt, sampling = kinds()[6]
    sections = [(prompt, replace(sampling, max_tokens=30, seed=seed)) for seed in range(2, 10)]
    return sections + [
        (
            prompt,
            replace(each, max_tokens=50, temperature=temperature, seed=seed, num_logprobs=num_top),
        )
        for temperature, seed, num_top in ((0.0, 0, None), (1.0, 5, 2))
        for prompt, each in kinds()
    ]


def answered(ranked: Ranked, asked: Sequence[Asked]) -> list[Answer]:
    answers = [ranked.submit(*each) for each in asked]
    wait_for_all(answers)
    return answers


def outcomes(answers: Sequence[Answer]) -> list[tuple[list[int], FinishReason | None]]:
    return [(answer.tokens, answer.reason) for answer in answers]


def checked(ranked: Ranked) -> tuple[int, int, int]:
    """How often guesses were checked, their number, and that of the right ones."""
    stats = ranked.engine.stats().scheduler
    return stats.num_checks, stats.num_guesses, stats.num_right_guesses


@pytest.fixture(scope="module")
def plain() -> list[Answer]:
    """The answers without guesses, one after the other."""
    with ranked_engine(1, **OPTIONS) as ranked:
        answers = [answered(ranked, [each])[0] for each in requests()]
    assert all(answer.error is None for answer in answers)
    return answers


@pytest.fixture(scope="module")
def guessing() -> Iterator[Ranked]:
    with ranked_engine(1, **OPTIONS, **GUESSING) as ranked:
        yield ranked


# --- the same answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False, "page_size": 1},
        {"speculative_tokens": 2, "page_size": 4, "max_prefill_tokens": 16},
        {"speculative_tokens": 40},
    ],
    ids=str,
)
def test_answers_are_those_without_guesses(plain: list[Answer], options: dict[str, Any]) -> None:
    with ranked_engine(1, **{**OPTIONS, **GUESSING, **options}) as ranked:
        together = answered(ranked, requests())
        alone = [answered(ranked, [each])[0] for each in requests()]
        _, num_guesses, num_right = checked(ranked)
    assert outcomes(together) == outcomes(plain)
    assert outcomes(alone) == outcomes(plain)
    assert 0 < num_right < num_guesses
    for found, expected in zip(alone, plain, strict=True):
        ranks = [one and one.rank for one in found.logprobs]
        assert ranks == [one and one.rank for one in expected.logprobs]


def test_answers_of_two_ranks_are_those_without_guesses(plain: list[Answer]) -> None:
    with ranked_engine(2, **OPTIONS, **GUESSING) as ranked:
        answers = answered(ranked, requests())
        assert checked(ranked)[2] > 0
    assert outcomes(answers) == outcomes(plain)


@pytest.mark.parametrize("case", ["lfm2", "qwen3.5"])
def test_answers_of_recurrent_models_are_those_without_guesses(case: str, tmp_path: Path) -> None:
    """Their states must not go on with wrong guesses."""
    write_checkpoint(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    config |= {"vocab_size": 2048, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(Path(DEMO_MODEL) / name)
    options = {**OPTIONS, "model": str(tmp_path)}
    with ranked_engine(1, **options) as ranked:
        expected = outcomes(answered(ranked, requests()))
    with ranked_engine(1, **options, **GUESSING) as ranked:
        assert outcomes(answered(ranked, requests())) == expected
        _, num_guesses, num_right = checked(ranked)
    assert 0 < num_right < num_guesses


@pytest.mark.parametrize("kind", [0, 8], ids=["records", "penalties"])
def test_samples_of_a_prompt_are_those_without_guesses(guessing: Ranked, kind: int) -> None:
    prompt, sampling = kinds()[kind]
    sampling = replace(sampling, max_tokens=50)
    found = []
    with ranked_engine(1, **OPTIONS) as plain:
        for ranked in (plain, guessing):
            ids = [ranked.engine.new_id() for _ in range(3)]
            samples = samples_of(Request(id=ids[0], prompt=prompt, sampling=sampling), ids)
            answers = [Answer(each) for each in ids]
            ranked.engine.submit_samples(samples, answers)
            wait_for_all(answers)
            found.append(outcomes(answers))
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens, _ in found[0]}) == 3


# --- what is guessed -----------------------------------------------------------------------------


class Guesses(ExecutorWrapper):
    """Keeps the guesses of all plans."""

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self.made: list[list[int]] = []

    def launch(self, plan: StepPlan) -> Pending:
        self.made += [guesses.tolist() for guesses in plan.checks.guesses().values()]
        return super().launch(plan)


def guesses_for(*asked: Asked) -> tuple[list[Answer], list[list[int]]]:
    """The answers of an engine of their own, one after the other, and all guesses."""
    made: list[Guesses] = []

    def recorded(executor: Any) -> Guesses:
        made.append(Guesses(executor))
        return made[0]

    options = EngineOptions.from_mapping({**OPTIONS, **GUESSING})
    engine = build_engine_alone(options, replace(STANDARD, executor=recorded))
    try:
        answers = [answered(Ranked(engine, None), [each])[0] for each in asked]
    finally:
        engine.close(drain_s=0)
    return answers, made[0].made


def test_forced_tokens_are_guessed_and_right(guessing: Ranked) -> None:
    """All but the first ones, which are sampled before anything is known, and the last."""
    before = checked(guessing)
    text = "the only answer that there is to this question"
    sampling = SamplingParams(max_tokens=60, grammar=grammar("choice", [text]))
    (answer,) = answered(guessing, [(PROMPT, sampling)])
    assert text_of(answer) == text and answer.reason is FinishReason.STOP
    num_checks, num_guesses, num_right = (
        after - once for after, once in zip(checked(guessing), before, strict=True)
    )
    assert num_guesses == num_right == len(answer.tokens) - 1 - num_checks
    assert num_checks == -(-(len(answer.tokens) - 1) // 7)


def test_guesses_go_on_into_a_grammar_from_the_section_before_it(plain: list[Answer]) -> None:
    answers, made = guesses_for(*requests()[:8])
    assert any(MARK in guesses[:-1] for guesses in made)
    assert outcomes(answers) == outcomes(plain[:8])


def test_a_grammar_may_end_after_right_guesses_and_before_wrong_ones() -> None:
    """The prompt goes on where the answer must end."""
    sampling = SamplingParams(max_tokens=30, grammar=grammar("regex", "x[ab]{3}yz?"))
    answers, made = guesses_for(
        *(
            (said("xaabyzxaabyzxbbbyzaaabyzxbabyz"), replace(sampling, seed=seed))
            for seed in range(8)
        )
    )
    assert made
    for answer in answers:
        assert answer.error is None and answer.reason is FinishReason.STOP
        assert text_of(answer)[0] == "x" and text_of(answer)[4:] in ("y", "yz")


# --- how requests end ----------------------------------------------------------------------------


def test_a_request_may_be_cancelled_while_its_guesses_are_checked(guessing: Ranked) -> None:
    """Another one goes on."""
    form = grammar("regex", "[ab]{900}")
    asked = said("abab"), SamplingParams(max_tokens=400, temperature=0.0, grammar=form)
    (whole,) = answered(guessing, [asked])
    for _ in range(3):
        answer, beside = guessing.submit(*asked), guessing.submit(*asked)
        assert answer.started.wait(60)
        guessing.engine.abort(answer.request_id)
        wait_for_all([answer, beside])
        assert answer.reason is FinishReason.CANCELLED
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert beside.tokens == whole.tokens


class PoisonedExecutor(ExecutorWrapper):
    """The logits after the second guess of the first check of several guesses are not finite."""

    was_met = False

    def launch(self, plan: StepPlan) -> Pending:
        step = super().launch(plan)
        checks = plan.checks
        counts = np.where(np.isin(checks.rows, plan.masked_rows), checks.lengths, 0)
        if self.was_met or not (counts > 3).any():
            return step
        self.was_met = True
        first = int(np.argmax(counts > 3))
        return NotFinite(step, int(checks.lengths[:first].sum()) + 2)


def test_a_request_fails_alone_if_logits_after_a_guess_are_not_finite(plain: list[Answer]) -> None:
    options = EngineOptions.from_mapping({**OPTIONS, **GUESSING})
    engine = build_engine_alone(options, replace(STANDARD, executor=PoisonedExecutor))
    try:
        answers = answered(Ranked(engine, None), requests())
    finally:
        engine.close(drain_s=0)
    (failed,) = [index for index, answer in enumerate(answers) if answer.error is not None]
    assert isinstance(answers[failed].error, EngineFailure)
    length = len(answers[failed].tokens)
    assert answers[failed].tokens == plain[failed].tokens[:length]
    for index, (answer, expected) in enumerate(zip(answers, plain, strict=True)):
        assert index == failed or outcomes([answer]) == outcomes([expected])


# --- bugs, put in on purpose, are noticed --------------------------------------------------------


def one_mask_for_all(patch: pytest.MonkeyPatch) -> None:
    """All samples of a step get the mask of its first one."""
    mask = MaskedStep.mask

    def mask_alike(self: MaskedStep, samples: IntArray) -> None:
        if len(samples):
            self.masks(len(samples))[:] = self.masks(1)
        mask(self, samples)

    patch.setattr(MaskedStep, "mask", mask_alike)


def guesses_not_taken(patch: pytest.MonkeyPatch) -> None:
    """Matchers take only the token after right guesses."""
    patch.setattr(Matcher, "consume", lambda self, token_ids: None)


def guesses_beyond_the_end(patch: pytest.MonkeyPatch) -> None:
    """Guesses may go on after what must be the end."""

    def everything(self: Constraints, request_id: RequestId, guesses: Sequence[int]) -> int:
        return len(guesses)

    patch.setattr(Constraints, "allowed", everything)


def sections_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Masks after guesses are made as if these were not part of a free section, nor of the
    answer's length."""
    patch.setattr(Matcher, "along", lambda self, guesses: [self] * (1 + len(guesses)))


@pytest.mark.parametrize(
    "inject", [one_mask_for_all, guesses_not_taken, guesses_beyond_the_end, sections_not_counted]
)
def test_a_bug_is_noticed(
    plain: list[Answer],
    inject: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inject(monkeypatch)
    with ranked_engine(1, **OPTIONS, **GUESSING) as ranked:
        answers = answered(ranked, requests())
    assert outcomes(answers) != outcomes(plain)
