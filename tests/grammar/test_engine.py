"""Structured outputs from a real engine, together with all else that a request may ask for."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from minisgl_backend import build
from minisgl_backend.build import (
    build_engine,
    build_engine_alone,
    build_executor,
    build_grammars,
)
from minisgl_backend.build_scheduler import build_scheduler
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import (
    EngineFailure,
    InvalidRequest,
    MiniSGLError,
    Overloaded,
    Unsupported,
)
from minisgl_backend.grammar.matchers import WORD, AnswerState, Batch, Grammars, Matcher
from minisgl_backend.kernels.sampling_table import WORD as WORD_OF_A_TABLE
from minisgl_backend.parts import STANDARD
from minisgl_backend.plan import NO_TOKEN, Pending, SampledTokens, StepPlan
from minisgl_backend.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    IntArray,
    Request,
    SamplingParams,
)
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.scheduling import scheduler
from minisgl_backend.scheduling.admission import AdmissionControl
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer_files import load_definition, load_vocabulary
from minisgl_kit.wrappers import ExecutorWrapper, PendingWrapper
from tests.parallel.engines import Answer, Ranked, ranked_engine, wait_for_all

VOCABULARY: Final = load_vocabulary(DEMO_MODEL)
EOS: Final = 0
OPTIONS: Final[dict[str, Any]] = {
    "model": DEMO_MODEL,
    "device": "cpu",
    "dtype": "float64",  # requests meet in steps of any size, which round differently
    "load_format": "dummy",
    "num_pages": 1024,
    "max_running_requests": 16,
}
PROMPT: Final = np.arange(20, 50, dtype=np.int32)


def piece(text: str) -> int:
    return VOCABULARY.pieces.index(text.encode())


def grammar(kind: str, source: Any, begins_after: int | None = None) -> Grammar:
    text = source if isinstance(source, str) else json.dumps(source)
    return Grammar(GrammarKind(kind), text, begins_after)


def text_of(answer: Answer) -> str:
    return TextStream(VOCABULARY).push(answer.tokens, final=True).text


@pytest.fixture(scope="module", params=[0, 5], ids=["plain", "guessing"])
def ranked(request: pytest.FixtureRequest) -> Iterator[Ranked]:
    with ranked_engine(1, **OPTIONS, speculative_tokens=request.param) as engine:
        yield engine


def answered(ranked: Ranked, *asked: SamplingParams) -> list[Answer]:
    answers = [ranked.submit(PROMPT, sampling) for sampling in asked]
    wait_for_all(answers)
    return answers


def only(ranked: Ranked, kind: str, source: Any, **sampling: Any) -> Answer:
    (answer,) = answered(ranked, SamplingParams(grammar=grammar(kind, source), **sampling))
    assert answer.error is None
    return answer


# --- how answers end -----------------------------------------------------------------------------


def test_an_answer_ends_with_its_grammar_and_a_cut_one_says_so(ranked: Ranked) -> None:
    whole = only(ranked, "choice", ["yes please", "no thanks"], max_tokens=60)
    assert text_of(whole) in ("yes please", "no thanks")
    assert whole.reason is FinishReason.STOP
    exact = only(ranked, "regex", "[a-c]{6}", max_tokens=60, seed=3)
    again = only(ranked, "regex", "[a-c]{6}", max_tokens=len(exact.tokens), seed=3)
    assert again.tokens == exact.tokens and again.reason is FinishReason.STOP
    cut = only(ranked, "regex", "[a-c]{6}", max_tokens=len(exact.tokens) - 1, seed=3)
    assert cut.tokens == exact.tokens[:-1] and cut.reason is FinishReason.LENGTH


def test_the_end_token_comes_where_the_grammar_may_end(ranked: Ranked) -> None:
    """With a bias that would end any answer at once."""
    wish: dict[str, Any] = {"max_tokens": 60, "logit_bias": ((EOS, 1000.0),)}
    answer = only(ranked, "regex", "ab[a-z]*", **wish)
    assert text_of(answer).startswith("ab") and answer.reason is FinishReason.STOP
    assert answer.tokens[-1] == EOS
    (free,) = answered(ranked, SamplingParams(**wish))
    assert free.tokens == [EOS]


def test_min_tokens_holds_the_end_back_while_more_may_come(ranked: Ranked) -> None:
    wish: dict[str, Any] = {"max_tokens": 40, "min_tokens": 12, "logit_bias": ((EOS, 1000.0),)}
    long = only(ranked, "regex", "[a-z]*", **wish)
    assert len(long.tokens) == 13 and long.tokens[-1] == EOS
    short = only(ranked, "choice", ["ok"], **wish)
    assert text_of(short) == "ok" and short.reason is FinishReason.STOP


def test_ignore_eos_goes_on_as_long_as_the_grammar_does(ranked: Ranked) -> None:
    wish: dict[str, Any] = {"max_tokens": 25, "ignore_eos": True, "logit_bias": ((EOS, 1000.0),)}
    long = only(ranked, "regex", "[a-z]*", **wish)
    assert len(long.tokens) == 25 and long.reason is FinishReason.LENGTH
    assert EOS not in long.tokens
    short = only(ranked, "regex", "[a-z]{3}x?", **wish)
    assert re.fullmatch("[a-z]{3}x?", text_of(short)) and short.reason is FinishReason.STOP


def test_a_stop_token_ends_an_answer_if_the_grammar_allows_it(ranked: Ranked) -> None:
    b = piece("b")
    wish: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": (b,), "logit_bias": ((b, 1000.0),)}
    assert only(ranked, "regex", "[ab]*", **wish).tokens == [b]
    late = only(ranked, "regex", "[ab]*", min_tokens=5, **wish)
    assert len(late.tokens) == 6 and late.tokens[-1] == b and b not in late.tokens[:-1]
    never = only(ranked, "regex", "a{8}", **wish)
    assert text_of(never) == "aaaaaaaa" and never.reason is FinishReason.STOP


def test_a_stop_token_that_alone_may_come_does_not_end_an_answer_early(ranked: Ranked) -> None:
    """The grammar needs it, and min_tokens says that it must not end the answer yet."""
    start = VOCABULARY.names.index("<|im_start|>")
    lark = f"start: <[{start}]> /[a-z]{{9}}/"
    answer = only(ranked, "grammar", lark, max_tokens=40, min_tokens=2, stop_token_ids=(start,))
    assert answer.tokens[0] == start and len(answer.tokens) > 2
    at_once = only(ranked, "grammar", lark, max_tokens=40, stop_token_ids=(start,))
    assert at_once.tokens == [start] and at_once.reason is FinishReason.STOP


# --- what else changes logits ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "wish",
    [
        {"logit_bias": tuple((piece(c), -100.0) for c in "yesno")},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"temperature": 0.0},
        {"temperature": 1e-3, "top_k": 1},
        {"top_p": 0.01, "temperature": 5.0},
        {"min_p": 1.0, "seed": 2**40},
    ],
)
def test_no_other_wish_breaks_a_grammar(ranked: Ranked, wish: dict[str, Any]) -> None:
    answer = only(ranked, "regex", "(yes|no)(,(yes|no))*", max_tokens=30, **wish)
    text = text_of(answer)
    assert re.fullmatch("((yes|no),)*(yes|no|y|ye|n)?", text)
    if answer.reason is FinishReason.STOP:
        assert re.fullmatch("(yes|no)(,(yes|no))*", text)


def test_log_probabilities_are_those_of_the_model_without_the_mask(ranked: Ranked) -> None:
    wish = SamplingParams(max_tokens=1, num_logprobs=3, seed=1)
    masked = replace(wish, grammar=grammar("choice", ["q"]))
    free, bound = answered(ranked, wish, masked)
    (of_free,), (of_bound,) = free.logprobs, bound.logprobs
    assert of_free is not None and of_bound is not None
    assert bound.tokens == [piece("q")]
    assert of_free.alternatives[:3] == of_bound.alternatives[:3]
    assert of_bound.logprob < of_bound.alternatives[2][1] < 0
    assert of_bound.rank > 3


def test_choices_of_one_request_differ_by_their_seeds(ranked: Ranked) -> None:
    """They come together, so their grammar is compiled once."""
    asked = [
        SamplingParams(max_tokens=20, seed=seed // 2, grammar=grammar("regex", "[a-m]{12}"))
        for seed in range(8)
    ]
    answers = answered(ranked, *asked)
    texts = [text_of(answer) for answer in answers]
    assert all(re.fullmatch("[a-m]{12}", text) for text in texts)
    assert texts[::2] == texts[1::2] and len(set(texts)) == 4


def test_a_grammar_begins_after_its_marker(ranked: Ranked) -> None:
    marker = VOCABULARY.names.index("<|im_start|>")
    wish = SamplingParams(
        max_tokens=300,
        seed=5,
        logit_bias=((EOS, 1000.0), (marker, 4.5)),
        grammar=grammar("choice", ["done"], begins_after=marker),
    )
    (answer,) = answered(ranked, wish)
    at = answer.tokens.index(marker)
    assert at > 0 and EOS not in answer.tokens
    assert VOCABULARY.pieces[answer.tokens[-1]] and answer.reason is FinishReason.STOP
    rest = b"".join(VOCABULARY.pieces[token] for token in answer.tokens[at + 1 :])
    assert rest == b"done"


# --- grammars that fail, and requests that end before they begin ---------------------------------


def test_a_grammar_that_comes_to_its_limits_fails_its_own_request(ranked: Ranked) -> None:
    a = piece("a")
    heavy = SamplingParams(
        max_tokens=400,
        logit_bias=((a, 1000.0),),
        grammar=grammar("regex", "(.*a.{1,30}){20}"),
    )
    fine = SamplingParams(max_tokens=60, grammar=grammar("regex", "[ab]{150}"))
    failed, answer = answered(ranked, heavy, fine)
    assert isinstance(failed.error, InvalidRequest) and "too complex" in str(failed.error)
    assert answer.error is None and set(text_of(answer)) == {"a", "b"}


def test_each_answer_that_fails_has_an_error_of_its_own(
    ranked: Ranked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the traceback of one error would grow with every request, and keep its callers alive."""

    def advance(
        grammars: Grammars, batch: Batch, token_ids: Sequence[int]
    ) -> dict[int, AnswerState]:
        return dict.fromkeys(range(len(token_ids)), AnswerState.BROKEN)

    monkeypatch.setattr(Grammars, "advance", advance)
    one, two = answered(ranked, *2 * [SamplingParams(grammar=grammar("choice", ["yes"]))])
    for answer in (one, two):
        assert isinstance(answer.error, EngineFailure)
        assert str(answer.error) == "a token does not follow the grammar"
    assert one.error is not two.error


def test_what_is_wrong_with_a_grammar_is_told(ranked: Ranked) -> None:
    wish = SamplingParams(grammar=grammar("json_schema", {"properties": {"a": {"not": {}}}}))
    (answer,) = answered(ranked, wish)
    assert isinstance(answer.error, InvalidRequest)
    assert "#/properties/a/not" in str(answer.error) and not answer.tokens


def test_an_engine_may_take_no_grammars() -> None:
    with ranked_engine(1, **OPTIONS, structured_outputs=False) as ranked:
        (answer,) = answered(ranked, SamplingParams(grammar=grammar("choice", ["a"])))
        assert isinstance(answer.error, Unsupported)
        assert "the option structured_outputs" in str(answer.error)


def test_grammars_are_followed_in_tokens_of_the_option_tokenizer(tmp_path: Path) -> None:
    """The model's own folder has another tokenizer, or none."""
    config = (Path(DEMO_MODEL) / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    answer = answered_alone({"model": str(tmp_path), "tokenizer": DEMO_MODEL})
    assert answer.error is None and text_of(answer) == "yes please"


def test_grammars_leave_out_special_tokens_beyond_the_embeddings(tmp_path: Path) -> None:
    """As those of Gemma 3 1B: it has no embedding for the token that stands for an image."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(DEMO_MODEL) / name).read_bytes())
    num_embeddings = json.loads((tmp_path / "config.json").read_bytes())["vocab_size"]
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_bytes())
    first = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"].append({**first, "id": num_embeddings, "content": "<image>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    answer = answered_alone({"model": str(tmp_path)})
    assert answer.error is None and text_of(answer) == "yes please"


def answered_alone(options: dict[str, Any]) -> Answer:
    """The answer of an engine with these options to a request for a single choice."""
    engine = build_engine(EngineOptions.from_mapping({**OPTIONS, **options}))
    answer = Answer(engine.new_id())
    sampling = SamplingParams(grammar=grammar("choice", ["yes please"]), max_tokens=60)
    engine.submit(Request(id=answer.request_id, prompt=PROMPT, sampling=sampling), answer)
    wait_for_all([answer])
    engine.close(drain_s=0)
    return answer


class HeldGrammars(Grammars):
    """Compiles nothing until told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held: list[Callable[[], object]] = []
        self.called = threading.Semaphore(0)

    def compile(
        self, sampling: SamplingParams, done: Callable[[Matcher | MiniSGLError], None]
    ) -> None:
        self.held.append(partial(super().compile, sampling, done))
        self.called.release()


@pytest.fixture
def held() -> Iterator[tuple[Engine, HeldGrammars]]:
    options = EngineOptions.from_mapping(OPTIONS)
    info, executor = build_executor(options)
    grammars = HeldGrammars(
        partial(load_definition, DEMO_MODEL), vocab_size=info.vocab_size, eos_token_ids=(EOS,)
    )
    planner = build_scheduler(options, info)
    engine = Engine(info, planner, executor, overlap=True, grammars=grammars)
    yield engine, grammars
    engine.close(drain_s=0)


def submitted(engine: Engine, deadline_s: float | None = None) -> Answer:
    answer = Answer(engine.new_id())
    sampling = SamplingParams(max_tokens=20, grammar=grammar("choice", ["fine"]))
    request = Request(id=answer.request_id, prompt=PROMPT, sampling=sampling, deadline_s=deadline_s)
    engine.submit(request, answer)
    return answer


def test_a_request_may_end_while_its_grammar_is_compiled(
    held: tuple[Engine, HeldGrammars],
) -> None:
    engine, grammars = held
    cancelled, late, whole = (
        submitted(engine),
        submitted(engine, time.monotonic() + 0.05),
        submitted(engine),
    )
    for _ in range(3):
        assert grammars.called.acquire(timeout=60)
    engine.abort(cancelled.request_id)
    assert cancelled.ended.wait(60) and cancelled.reason is FinishReason.CANCELLED
    assert late.ended.wait(60) and isinstance(late.error, Overloaded)
    assert engine.stats().num_open == 1
    for compile_now in grammars.held:
        compile_now()
    assert whole.ended.wait(60) and text_of(whole) == "fine"
    assert not cancelled.tokens and not late.tokens


def test_a_drain_waits_for_grammars(held: tuple[Engine, HeldGrammars]) -> None:
    engine, grammars = held
    answer = submitted(engine)
    assert grammars.called.acquire(timeout=60)
    closing = threading.Thread(target=engine.close, kwargs={"drain_s": 60})
    closing.start()
    grammars.held[0]()
    closing.join(60)
    assert not closing.is_alive() and text_of(answer) == "fine"


def test_a_drain_that_is_over_fails_what_is_compiled(held: tuple[Engine, HeldGrammars]) -> None:
    engine, grammars = held
    answer = submitted(engine)
    assert grammars.called.acquire(timeout=60)
    engine.close(drain_s=0)
    assert isinstance(answer.error, Overloaded)
    grammars.held[0]()  # too late: nothing happens


# --- the same answer in any company ---------------------------------------------------------------


SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMS: Final = [
    grammar("regex", "[a-z ]{5,60}"),
    None,
    grammar("json_schema", SCHEMA),
    grammar("json_schema", {"type": "array", "items": SCHEMA, "minItems": 3}),
    grammar("choice", ["alpha", "beta", "gamma delta"]),
]


def company() -> list[tuple[IntArray, SamplingParams]]:
    """Requests of all kinds; some share the beginning of their prompts."""
    rng = np.random.default_rng(11)
    shared = rng.integers(10, 1900, 40).astype(np.int32)
    asked = []
    for index in range(20):
        own = rng.integers(10, 1900, rng.integers(1, 40)).astype(np.int32)
        prompt = np.concatenate([shared[: 20 * (index % 3)], own])
        sampling = SamplingParams(
            max_tokens=int(rng.integers(1, 50)),
            min_tokens=index % 2,
            temperature=float(index % 4 > 0),
            top_k=20 * (index % 7 == 0),
            repetition_penalty=1.0 + 0.2 * (index % 5 == 0),
            seed=index,
            grammar=FORMS[index % len(FORMS)],
        )
        asked.append((prompt, sampling))
    return asked


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], FinishReason | None]]:
    found = []
    with ranked_engine(1, **OPTIONS) as ranked:
        for prompt, sampling in company():
            answer = ranked.submit(prompt, sampling)
            wait_for_all([answer])
            found.append((answer.tokens, answer.reason))
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"max_prefill_tokens": 16, "page_size": 4},
        {"num_pages": 40, "page_size": 4},
        {"num_pages": 40, "page_size": 4, "overlap": False},
        {"speculative_tokens": 6, "speculative_max_requests": 20},
        {"speculative_tokens": 3, "overlap": False, "page_size": 4},
        {"speculative_tokens": 6, "num_pages": 40, "page_size": 4},
    ],
    ids=str,
)
def test_the_same_answer_in_any_company(
    alone: list[tuple[list[int], FinishReason | None]],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small pools admit requests without room for their answers, and retract some."""
    monkeypatch.setattr(scheduler, "AdmissionControl", lambda life, _: AdmissionControl(life, 0))
    with ranked_engine(1, **{**OPTIONS, **options}) as ranked:
        for form in FORMS:  # kept from here on, so none of the company has to wait for it
            answered(ranked, SamplingParams(max_tokens=1, grammar=form))
        answers = [ranked.submit(*asked) for asked in company()]
        wait_for_all(answers)
        assert [(answer.tokens, answer.reason) for answer in answers] == alone
        stats = ranked.engine.stats().scheduler
        if "num_pages" in options:
            assert stats.num_retractions > 3
        if "speculative_tokens" in options:
            assert stats.num_right_guesses > 0


class BreakingExecutor(ExecutorWrapper):
    """Breaks the tenth step, when it gets its masks or when its tokens are read."""

    def __init__(self, executor: Any, when: str) -> None:
        super().__init__(executor)
        self.when = when
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> Pending:
        self.num_steps += 1
        step = super().launch(plan)
        return BreakingStep(step, self.when) if self.num_steps == 10 else step


class BreakingStep(PendingWrapper):
    def __init__(self, step: Pending, when: str) -> None:
        super().__init__(step)
        self.when = when

    def mask(self, samples: IntArray) -> None:
        super().mask(samples)
        if self.when == "masked":
            raise RuntimeError("broken while it was masked")

    def tokens(self) -> SampledTokens:
        sampled = super().tokens()
        if self.when == "read":
            raise RuntimeError("broken while it was read")
        return sampled


@pytest.mark.parametrize("when", ["masked", "read"])
@pytest.mark.parametrize(("overlap", "num_guesses"), [(True, 0), (True, 5), (False, 0)])
def test_the_same_answer_after_a_step_that_broke(
    alone: list[tuple[list[int], FinishReason | None]], overlap: bool, num_guesses: int, when: str
) -> None:
    guessing = {"speculative_tokens": num_guesses, "speculative_max_requests": 20}
    options = EngineOptions.from_mapping({**OPTIONS, **(guessing if num_guesses else {})})
    info, executor = build_executor(options)
    engine = Engine(
        info,
        build_scheduler(options, info),
        BreakingExecutor(executor, when),
        overlap=overlap,
        grammars=build_grammars(options, Path(info.folder), info.vocab_size, info.eos_token_ids),
    )
    try:
        ranked = Ranked(engine, None)
        answers = [ranked.submit(*asked) for asked in company()]
        wait_for_all(answers)
    finally:
        engine.close(drain_s=0)
    assert [(answer.tokens, answer.reason) for answer in answers] == alone


class NotFinite(PendingWrapper):
    """A step in which a sample has no token."""

    def __init__(self, step: Pending, index: int) -> None:
        super().__init__(step)
        self.index = index

    def tokens(self) -> SampledTokens:
        sampled = super().tokens()
        token_ids = sampled.token_ids.copy()
        token_ids[self.index] = NO_TOKEN
        return replace(sampled, token_ids=token_ids)


class PoisonedExecutor(ExecutorWrapper):
    """The fifth logits of a long answer with a grammar are not finite."""

    row: int | None = None
    num_steps = 0

    def launch(self, plan: StepPlan) -> Pending:
        step = super().launch(plan)
        for admission in plan.admissions:
            sampling = admission.sampling
            if self.row is None and sampling.grammar == FORMS[3] and sampling.max_tokens > 10:
                self.row = admission.row
        rows = plan.masked_rows.tolist()
        self.num_steps += self.row in rows
        if self.num_steps != 5 or self.row not in rows:
            return step
        return NotFinite(step, plan.sample_rows.tolist().index(self.row))


@pytest.mark.parametrize("overlap", [True, False])
def test_the_others_go_on_if_a_row_with_a_grammar_gets_no_token(
    alone: list[tuple[list[int], FinishReason | None]], overlap: bool
) -> None:
    options = EngineOptions.from_mapping({**OPTIONS, "overlap": overlap})
    engine = build_engine_alone(options, replace(STANDARD, executor=PoisonedExecutor))
    try:
        ranked = Ranked(engine, None)
        answers = [ranked.submit(*asked) for asked in company()]
        wait_for_all(answers)
    finally:
        engine.close(drain_s=0)
    (failed,) = [index for index, answer in enumerate(answers) if answer.error is not None]
    assert isinstance(answers[failed].error, EngineFailure)
    assert answers[failed].tokens == alone[failed][0][:4]
    for index, (answer, told) in enumerate(zip(answers, alone, strict=True)):
        assert index == failed or (answer.tokens, answer.reason) == told


def test_the_same_answer_from_two_ranks() -> None:
    found = []
    for size in (1, 2):
        with ranked_engine(size, **OPTIONS) as ranked:
            answers = [ranked.submit(*asked) for asked in company()]
            wait_for_all(answers)
            found.append([(answer.tokens, answer.reason) for answer in answers])
    assert found[0] == found[1]


def test_a_mask_is_made_as_it_is_read() -> None:
    assert WORD == WORD_OF_A_TABLE


def test_an_engine_is_there_once_a_large_tokenizer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one keeps the loop from running, so it must not coincide with the first requests."""
    is_built, may_read = threading.Event(), threading.Event()

    def slow(folder: str, num_embeddings: int) -> tuple[str, dict[str, int]]:
        assert may_read.wait(60)
        return load_definition(folder, num_embeddings=num_embeddings)

    def planner(*args: Any) -> scheduler.Scheduler:
        is_built.set()
        return scheduler.Scheduler(*args)

    monkeypatch.setattr(build, "_READ_AT_ONCE", 0)
    monkeypatch.setattr(build, "load_definition", slow)
    options = EngineOptions(device="cpu", num_pages=16, max_sequence_length=128)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(build_engine, options, replace(STANDARD, scheduler=planner))
        assert is_built.wait(60)
        assert not wait([made], timeout=0.3).done
        may_read.set()
        made.result(60).close(drain_s=0)
