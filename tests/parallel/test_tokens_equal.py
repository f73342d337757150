"""Two, four and (by night) eight ranks make the same tokens as one, whatever they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl_backend.request import Request, SamplingParams, samples_of
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE
from tests.parallel.engines import (
    WAIT_S,
    Answer,
    Ranked,
    ranked_engine,
    some_prompts,
    wait_for_all,
)
from tests.waiting import wait_until

OPTIONS = {
    "max_sequence_length": CONTEXT,
    "max_prefill_tokens": 32,  # most prompts take several chunks
    "max_running_requests": 8,
    "num_pages": 72,  # too few for all at once, so some are evicted or retracted
    "page_size": 8,
    "distributed_timeout_s": 60,
}
SAMPLINGS = (
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.9, seed=7),
    SamplingParams(max_tokens=12, temperature=1.2, top_p=0.8, top_k=20, seed=2**63 + 5),
    SamplingParams(
        max_tokens=12, temperature=0.7, seed=3, repetition_penalty=1.3, frequency_penalty=0.5
    ),
    SamplingParams(max_tokens=12, num_logprobs=2, logit_bias=((5, 2.0), (9, -100.0))),
    SamplingParams(max_tokens=0, num_prompt_logprobs=3),
    SamplingParams(max_tokens=12, num_prompt_logprobs=0),
)


@pytest.fixture(scope="module")
def of_one_rank(checkpoints: Path) -> Callable[[str], list[Answer]]:
    """What one rank answers with a checkpoint."""

    @functools.cache
    def serve_alone(case: str) -> list[Answer]:
        with ranked_engine(1, checkpoints / case, **OPTIONS) as ranked:
            return serve(ranked)

    return serve_alone


@pytest.mark.parametrize(
    ("size", "case"),
    [
        (2, "llama"),
        (2, "qwen3"),
        (2, "qwen3-moe"),
        pytest.param(4, "llama", marks=pytest.mark.nightly),
        pytest.param(4, "qwen3", marks=pytest.mark.nightly),
        (4, "qwen3-moe"),
    ],
)
def test_tokens_are_those_of_one_rank(
    checkpoints: Path, case: str, size: int, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    """With four ranks, each of the two key-value heads is on two ranks."""
    with ranked_engine(size, checkpoints / case, **OPTIONS) as ranked:
        check_equal(serve(ranked), of_one_rank(case))


def test_tokens_of_whole_experts(
    checkpoints: Path, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    options = {**OPTIONS, "expert_parallel": True}
    with ranked_engine(2, checkpoints / "qwen3-moe", **options) as ranked:
        check_equal(serve(ranked), of_one_rank("qwen3-moe"))


@pytest.mark.parametrize("case", ["qwen3", "qwen3.5"])
def test_tokens_of_prefixes_from_main_memory(
    checkpoints: Path, case: str, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    """Each rank keeps its own part of the pages and states."""
    options = {**OPTIONS, "num_pages": 32, "host_cache_gib": 0.02}
    with ranked_engine(2, checkpoints / case, **options) as ranked:
        for _ in range(2):
            check_equal(serve(ranked), of_one_rank(case), tolerance=1e-4)
        scheduler = ranked.engine.stats().scheduler
    assert scheduler.host_loaded_tokens > 0
    assert scheduler.host_saved_tokens >= 8 * scheduler.used_host_slots > 0


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(4, "qwen3-moe", marks=pytest.mark.nightly),
        pytest.param(4, "eight-heads", marks=pytest.mark.nightly),
        pytest.param(8, "eight-heads", marks=pytest.mark.nightly),
    ],
)
def test_tokens_of_whole_experts_of_many_ranks(
    checkpoints: Path, size: int, case: str, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    """In the first case and the last, each key-value head is on two ranks."""
    options = {**OPTIONS, "expert_parallel": True}
    with ranked_engine(size, checkpoints / case, **options) as ranked:
        check_equal(serve(ranked), of_one_rank(case))


@pytest.mark.parametrize(("case", "window"), [("gpt-oss", 20), ("mistral-window", 24)])
def test_tokens_of_layers_with_window_pages(
    checkpoints: Path, case: str, window: int, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    """There are too few window pages for all rows. In the second case all layers have them."""
    with ranked_engine(2, checkpoints / case, **OPTIONS) as ranked:
        info = ranked.engine.info
        assert (info.window, info.num_window_pages) == (window, info.num_pages // 2)
        check_equal(serve(ranked), of_one_rank(case))


def test_tokens_of_attention_in_sections(
    checkpoints: Path, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    with ranked_engine(2, checkpoints / "llama4", **OPTIONS) as ranked:
        assert (ranked.engine.info.section, ranked.engine.info.window) == (48, 48)
        check_equal(serve(ranked), of_one_rank("llama4"))


@pytest.mark.parametrize("case", ["qwen3", "qwen3.5"])
def test_guesses_do_not_change_tokens(checkpoints: Path, case: str) -> None:
    """Rows repeat themselves: first greedy ones, whose ranks compare the best of their own logits,
    then those that sample from three tokens, at last with a penalty. With recurrent states only the
    latter do."""
    few = SamplingParams(
        max_tokens=40,
        seed=3,
        logit_bias=((0, 100.0), (1, 100.0), (2, 100.0)),
        num_prompt_logprobs=0,
    )
    waves = [
        [SamplingParams(max_tokens=40, temperature=0.0)] * 6,
        [few, replace(few, temperature=0.0), replace(few, num_logprobs=1)] * 2,
        [replace(few, frequency_penalty=0.1, temperature=float(index % 2)) for index in range(6)],
    ]
    waves = waves if case == "qwen3" else waves[1:]
    prompts = some_prompts(6, vocab_size=3)
    answers = []
    for size, num_tokens in ((1, 0), (2, 5)):
        options = {**OPTIONS, "speculative_tokens": num_tokens}
        with ranked_engine(size, checkpoints / case, **options) as ranked:
            num_right, found = 0, list[Answer]()
            for wave in waves:
                found += map(ranked.submit, prompts, wave)
                wait_for_all(found)
                wait_until(lambda: _all_pages_back(ranked))
                stats = ranked.engine.stats().scheduler
                if num_tokens:
                    assert num_right < stats.num_right_guesses < stats.num_guesses
                num_right = stats.num_right_guesses
        answers.append(found)
    # norms of what recurrent heads read magnify rounding errors
    check_equal(*answers, tolerance=1e-6 if case == "qwen3" else 1e-4)


def test_tokens_of_steps_that_do_not_overlap(
    checkpoints: Path, of_one_rank: Callable[[str], list[Answer]]
) -> None:
    with ranked_engine(2, checkpoints / "qwen3", overlap=False, **OPTIONS) as ranked:
        check_equal(serve(ranked), of_one_rank("qwen3"))


@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8_e4m3"])
def test_samples_of_two_ranks(checkpoints: Path, kv_cache_dtype: str | None) -> None:
    """Each rank copies its share of the prompt's last page."""
    kind = {"kv_cache_dtype": kv_cache_dtype} if kv_cache_dtype else {}
    asked = SamplingParams(max_tokens=12, temperature=1.1, seed=5)
    own, together = [], []
    for size in (1, 2):
        with ranked_engine(size, checkpoints / "qwen3", **OPTIONS, **kind) as ranked:
            for prompt in some_prompts(4, vocab_size=VOCAB_SIZE, seed=3):
                ids = [ranked.engine.new_id() for _ in range(5)]
                samples = samples_of(Request(id=ids[0], prompt=prompt, sampling=asked), ids)
                answers = [Answer(request_id) for request_id in ids]
                ranked.engine.submit_samples(samples, answers)
                together += answers
                if size == 1:
                    own += [ranked.submit(prompt, sample.sampling) for sample in samples]
            wait_for_all([*own, *together])
            wait_until(lambda: _all_pages_back(ranked))
    assert not any(answer.error for answer in together)
    assert [answer.tokens for answer in together] == [answer.tokens for answer in own * 2]


def test_converted_weights_are_those_of_one_rank(checkpoints: Path) -> None:
    """The ranks' shares cut the blocks of 128 x 128, each with a scale."""
    answers = []
    for size in (1, 2):
        with ranked_engine(size, checkpoints / "qwen3", quantization="fp8", **OPTIONS) as ranked:
            assert ranked.engine.info.weights.startswith("fp8 in blocks of 128 x 128")
            answers.append(serve(ranked))
    check_equal(*answers)


def test_random_weights_are_those_of_one_rank(checkpoints: Path) -> None:
    answers = []
    for size in (1, 2):
        with ranked_engine(size, checkpoints / "qwen3", load_format="dummy", **OPTIONS) as ranked:
            answers.append(serve(ranked))
    check_equal(*answers)


def serve(ranked: Ranked) -> list[Answer]:
    """The answers to two waves of requests; the second wave finds prefixes cached.

    Other requests run beside them until they are aborted. In the end every page is free or cached.
    """
    answers = []
    for seed in range(2):
        beside = [
            ranked.submit(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
            for prompt in some_prompts(3, vocab_size=VOCAB_SIZE, seed=9)
        ]
        wave = [
            ranked.submit(prompt, SAMPLINGS[index % len(SAMPLINGS)])
            for index, prompt in enumerate(some_prompts(14, vocab_size=VOCAB_SIZE, seed=seed))
        ]
        for answer in beside:
            assert answer.started.wait(WAIT_S)
            ranked.engine.abort(answer.request_id)
        wait_for_all([*beside, *wave])
        answers += wave
    wait_until(lambda: _all_pages_back(ranked))
    return answers


def _all_pages_back(ranked: Ranked) -> bool:
    pages = ranked.engine.stats().scheduler
    return pages.free_pages + pages.cached_pages == pages.total_pages


def check_equal(found: list[Answer], expected: list[Answer], *, tolerance: float = 1e-6) -> None:
    for index, (answer, wanted) in enumerate(zip(found, expected, strict=True)):
        assert answer.error is None
        assert answer.tokens == wanted.tokens, f"request {index}"
        for one, other in zip(answer.logprobs, wanted.logprobs, strict=True):
            assert (one is None) is (other is None)
            if one is not None and other is not None:
                assert one.rank == other.rank
                assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
        scores = zip(answer.prompt_logprobs, wanted.prompt_logprobs, strict=True)
        for score, expected_score in scores:
            assert score.rank == expected_score.rank
            assert score.logprob == pytest.approx(expected_score.logprob, abs=tolerance)
            ids = [token for token, _ in score.alternatives]
            assert ids == [token for token, _ in expected_score.alternatives]
    assert sum(len(answer.prompt_logprobs) > 0 for answer in found) >= 4
