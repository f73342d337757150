"""`n` and `best_of` in process: each sample is what a separate request with its seed gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from minisgl_backend import LLM, Output
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import Cancelled, EngineFailure, InvalidRequest, Unsupported
from minisgl_backend.offline.call import Mailbox, PreparedPrompt
from minisgl_backend.offline.submitter import QueuedPrompt, Submitter
from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    Generated,
    Request,
    RequestId,
    samples_of,
)
from minisgl_backend.scheduling import scheduler
from minisgl_backend.scheduling.admission import AdmissionControl
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_backend.wire.packets import StreamStart
from tests.fakes.clock import LoopClock, passing_within_the_answer

STORY = "Tell me a story about a fox, please, and make it a rather long one."
HOT: dict[str, Any] = {"temperature": 1.8, "max_tokens": 24, "ignore_eos": True, "seed": 2**64 - 2}
KINDS: list[dict[str, Any]] = [
    HOT,
    {**HOT, "temperature": 0},
    {**HOT, "presence_penalty": 1.0, "repetition_penalty": 1.2, "num_logprobs": 1},
    {**HOT, "ignore_eos": False, "structured_outputs": {"regex": "[a-f]{3,9}"}},
    {**HOT, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {"5": 2.0}},
    {**HOT, "stop": ["e", "th"], "min_tokens": 2},
]
EXACT: dict[str, Any] = {"dtype": "float64"}
"""Steps of other sizes round differently, which a near tie between two tokens would show."""
SETUPS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "chunked": {"max_prefill_tokens": 16, "page_size": 4},
    "few rows, large pages": {"max_running_requests": 2, "page_size": 64},
    "few pages": {"num_pages": 40, "page_size": 4},
    "nothing cached, without overlap": {"cache": "naive", "overlap": False},
}


@pytest.fixture(scope="module", params=SETUPS)
def one(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(**EXACT, **SETUPS[request.param]) as made:
        yield made


class Unasked(Submitter):
    """Nothing was submitted, so it has nothing to do."""

    def __init__(self) -> None:
        pass

    def ended(self, prompt: QueuedPrompt, num_tokens: int, *, is_last: bool) -> None:
        pass


def told(outputs: Sequence[Output]) -> list[tuple[Any, ...]]:
    return [
        (o.text, o.token_ids, o.finish_reason, o.stop_reason, o.num_input_tokens) for o in outputs
    ]


def test_samples_are_what_requests_of_their_own_get(one: LLM) -> None:
    """From a cold cache, with others, and from a warm cache."""
    prompts = [f"{number}. {STORY}" for number in range(len(KINDS))]
    kinds = [{**kind, "max_tokens": 16} for kind in KINDS]
    asked = [{**kind, "n": 3} for kind in kinds]
    cold = one.generate(prompts, asked)
    assert [(o.index, o.sample) for o in cold] == [
        (i, k) for i in range(len(KINDS)) for k in range(3)
    ]
    own = [
        one.generate(prompt, {**kind, "seed": (kind["seed"] + sample) % 2**64})[0]
        for prompt, kind in zip(prompts, kinds, strict=True)
        for sample in range(3)
    ]
    assert told(cold) == told(own) == told(one.generate(prompts, asked))
    for output, alone in zip(cold, own, strict=True):
        assert [x.logprob for x in output.logprobs] == pytest.approx(
            [x.logprob for x in alone.logprobs], abs=1e-4
        )


def test_samples_that_are_retracted_get_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are admitted without room for their answers."""
    monkeypatch.setattr(scheduler, "AdmissionControl", lambda life, _: AdmissionControl(life, 0))
    asked = {**HOT, "max_tokens": 120}
    with LLM(**EXACT, num_pages=40, page_size=4) as made:
        outputs = made.generate(STORY, {**asked, "n": 3})
        assert made.stats().scheduler.num_retractions > 0
        own = [
            made.generate(STORY, {**asked, "seed": (HOT["seed"] + i) % 2**64})[0] for i in (0, 1, 2)
        ]
    assert told(outputs) == told(own)


def test_a_prompt_is_computed_once(llm: LLM) -> None:
    prompt = "A prompt that no other test has. " * 8
    before = llm.stats()
    outputs = llm.generate(prompt, {**HOT, "n": 6})
    after = llm.stats()
    assert after.num_prompt_tokens - before.num_prompt_tokens == outputs[0].num_input_tokens
    hits = after.scheduler.prefix_hits - before.scheduler.prefix_hits
    assert hits == 5 * ((outputs[0].num_input_tokens - 1) // 16 * 16)
    assert {output.num_cached_tokens for output in outputs} == {0}


def test_deltas_of_samples_add_up(llm: LLM) -> None:
    asked = {**HOT, "n": 3, "num_logprobs": 0, "stop": ["an"]}
    whole = llm.generate(STORY, asked)
    deltas = list(llm.stream(STORY, asked))
    for output in whole:
        own = [delta for delta in deltas if delta.sample == output.sample]
        assert "".join(delta.text for delta in own) == output.text
        assert [t for delta in own for t in delta.token_ids] == output.token_ids
        assert [x.rank for delta in own for x in delta.logprobs] == [
            x.rank for x in output.logprobs
        ]
        reasons = [delta.finish_reason for delta in own]
        assert reasons == [None] * (len(own) - 1) + [output.finish_reason]


def test_the_best_are_those_of_the_highest_log_probability(llm: LLM) -> None:
    every = llm.generate(STORY, {**HOT, "n": 7, "return_cumulative_logprob": True})
    best = llm.generate(STORY, {**HOT, "n": 2, "best_of": 7, "return_cumulative_logprob": True})
    ranked = sorted(every, key=lambda o: -(o.cumulative_logprob or 0))
    assert [o.sample for o in best] == [0, 1]
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]]
    silent = llm.generate(STORY, {**HOT, "best_of": 7})
    assert [o.text for o in silent] == [best[0].text]
    assert silent[0].cumulative_logprob is None and silent[0].logprobs == ()


def test_a_stop_string_ends_one_sample(llm: LLM) -> None:
    free = llm.generate(STORY, {**HOT, "n": 4})
    stop = free[2].text[10:18]
    assert [stop in output.text for output in free] == [False, False, True, False]
    outputs = llm.generate(STORY, {**HOT, "n": 4, "stop": [stop]})
    assert [output.stop_reason for output in outputs] == [None, None, stop, None]
    assert outputs[2].text == free[2].text[:10]
    assert [outputs[i].token_ids for i in (0, 1, 3)] == [free[i].token_ids for i in (0, 1, 3)]


def test_a_sample_that_a_stop_string_has_ended_may_fail_afterwards() -> None:
    """Its tokens, and its error, may also come together."""
    vocabulary = load_vocabulary(Path(DEMO_MODEL))
    ids = range(len(vocabulary))
    x, y = (
        next(i for i in ids if vocabulary.token_bytes(i) == spelled) for spelled in (b"x", b"y")
    )
    start = StreamStart(num_input_tokens=1, stop_strings=("xy",), num_samples=2, n=2)
    request = Request(id=RequestId(1), prompt=np.zeros(1, np.int32))
    prepared = PreparedPrompt(samples_of(request, [RequestId(1), RequestId(2)]), start, 0)
    failed = Failed(EngineFailure("the model's logits were not finite"))
    for reads in (0, 1):
        box = Mailbox(0, prepared, vocabulary, SimpleQueue(), Unasked())
        for token_id in (x, y):
            box.put(1, Generated(token_id))
        outputs = box.read() if reads else []
        box.put(1, failed)
        box.put(0, Generated(x, is_last=True))
        box.put(0, Finished(FinishReason.LENGTH))
        outputs += box.read()
        assert [(o.text, o.finish_reason) for o in outputs] == [("x", "length"), ("", "stop")]
    box = Mailbox(0, prepared, vocabulary, SimpleQueue(), Unasked())
    box.put(1, Generated(x))
    box.put(1, failed)
    with pytest.raises(EngineFailure, match="not finite"):
        box.read()


def test_every_sample_has_the_prompts_log_probabilities(llm: LLM) -> None:
    asked = {"num_prompt_logprobs": 1, "n": 3, "seed": 3}
    (alone,) = llm.generate(STORY, {**asked, "n": 1, "max_tokens": 0})
    for max_tokens in (0, 3):
        outputs = llm.generate(STORY, {**asked, "max_tokens": max_tokens})
        assert [len(output.token_ids) for output in outputs] == [max_tokens] * 3
        for output in outputs:
            assert [x and x.rank for x in output.prompt_logprobs] == [
                x and x.rank for x in alone.prompt_logprobs
            ]


def test_samples_end_with_their_call(llm: LLM) -> None:
    stream = llm.stream(STORY, {**HOT, "n": 5, "max_tokens": 4000})
    next(stream)
    stream.close()
    (after,) = llm.generate("x", {"max_tokens": 1})
    assert after.finish_reason == "length"
    assert llm.stats().num_open == 0


def test_a_deadline_ends_all_samples(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**HOT, "n": 3, "max_tokens": 8000, "timeout_ms": 3_600_000}
    with passing_within_the_answer(llm, LoopClock(monkeypatch), 3601):
        outputs = llm.generate(STORY, asked)
    assert [output.finish_reason for output in outputs] == ["timeout"] * 3


def test_a_closed_llm_ends_all_samples() -> None:
    with LLM(max_running_requests=2, num_pages=64) as made:
        stream = made.stream(STORY, {**HOT, "n": 5, "max_tokens": 500})
        next(stream)
        made.close()
        with pytest.raises(Cancelled):
            list(stream)


def test_more_samples_than_the_engine_has_room_for() -> None:
    with LLM(max_running_requests=2, max_queued_requests=3, num_pages=64) as made:
        outputs = made.generate(["a", "b", "c"], {**HOT, "n": 5})
        assert len(outputs) == 15
        with pytest.raises(InvalidRequest, match="at most 5 samples fit the engine, 2 running"):
            made.generate("a", {"n": 6})


def test_best_of_is_not_for_streams(llm: LLM) -> None:
    with pytest.raises(Unsupported, match="best_of must be n, 2, with stream, got 3"):
        llm.stream("x", {"n": 2, "best_of": 3})
