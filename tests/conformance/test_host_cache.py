"""Prefixes that come back from main memory give the tokens that transformers gives.

The pages hold too little for all prompts, so their prefixes are evicted before they come again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import IntArray, SamplingParams
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.eagle_checkpoints import PREDICTABLE, write_eagle_checkpoint
from tests.conformance.engines import (
    Outcome,
    TinyEngine,
    load_model,
    prompts_with_shared_prefixes,
)
from tests.conformance.mtp_checkpoints import write_mtp_checkpoint
from tests.conformance.test_tokens_equal_transformers import GREEDY, Answers

PROMPTS: Final = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=7, count=9)
NUM_RUNS: Final = 3


def answers(
    model: Decoder, prompts: list[IntArray] = PROMPTS, **options: Any
) -> tuple[list[Outcome], int]:
    """The outcomes of several runs over the same prompts, and the tokens that were loaded."""
    options = {"page_size": 4, "num_positions": 240, "reserve_tokens": 0, **options}
    with TinyEngine(model, context=CONTEXT, **options) as engine:
        outcomes = [engine.run(prompts, [GREEDY] * len(prompts)) for _ in range(NUM_RUNS)]
        return outcomes, engine.num_loaded_tokens


def check_same(model: Decoder, **options: Any) -> None:
    """The tokens are those of an engine that computes everything itself."""
    cold, _ = answers(model, radix=False, **options)
    outcomes, num_loaded = answers(model, num_host_slots=200, **options)
    assert num_loaded > 0
    for outcome in outcomes:
        assert outcome.tokens == cold[0].tokens


@pytest.mark.parametrize("case", ["qwen3", "deepseek-v3", "deepseek-v32"])
@pytest.mark.parametrize("options", [{}, {"num_host_slots": 24, "overlap": False, "page_size": 8}])
def test_tokens_are_equal(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = write_checkpoint(case, tmp_path)
    reference = Answers([theirs] * len(PROMPTS), PROMPTS)
    model = load_model(tmp_path, context=CONTEXT)
    outcomes, num_loaded = answers(model, **{"num_host_slots": 200, **options})
    assert num_loaded > 0
    for outcome in outcomes:
        assert outcome.tokens == reference.tokens(outcome.tokens)
    without, _ = answers(model, **{**options, "num_host_slots": 0})
    if not options:
        assert outcomes[-1].num_cached_tokens > without[-1].num_cached_tokens


@pytest.mark.parametrize(
    "case", ["qwen3.5", "nemotron-h", "lfm2", "kimi-linear", "olmo-hybrid", "granite-hybrid"]
)
@pytest.mark.parametrize(
    "options", [{}, {"num_host_slots": 60, "num_state_slots": 9, "overlap": False, "page_size": 8}]
)
def test_tokens_of_recurrent_layers(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """States come from main memory, with pages or for pages that are still cached."""
    theirs = write_checkpoint(case, tmp_path)
    reference = Answers([theirs] * len(PROMPTS), PROMPTS)
    model = load_model(tmp_path, context=CONTEXT)
    chosen = {"num_host_slots": 200, "num_state_slots": 40, "num_snapshots": 12, **options}
    outcomes, num_loaded = answers(model, **chosen)
    assert num_loaded > 0
    for outcome in outcomes:
        assert outcome.tokens == reference.tokens(outcome.tokens)
    without, _ = answers(model, **{**chosen, "num_host_slots": 0})
    if not options:
        assert outcomes[-1].num_cached_tokens > without[-1].num_cached_tokens


@pytest.mark.parametrize(
    "case", ["mistral-window", "gemma3", "gemma4-per-layer", "gpt-oss", "llama4", "qwen2-window"]
)
@pytest.mark.parametrize(
    "options", [{}, {"num_host_slots": 60, "num_window_slots": 24, "overlap": False, "chunk": 7}]
)
def test_tokens_of_layers_with_windows(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Window pages come from main memory, too, if layers have any."""
    theirs = write_checkpoint(case, tmp_path)
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7, count=9)
    reference = Answers([theirs] * len(prompts), prompts)
    model = load_model(tmp_path, context=CONTEXT)
    chosen = {"num_host_slots": 400, "num_window_slots": 200, "num_positions": 320, **options}
    outcomes, num_loaded = answers(model, prompts, **chosen)
    assert num_loaded > 0
    for outcome in outcomes:
        assert outcome.tokens == reference.tokens(outcome.tokens)
    without, _ = answers(model, prompts, **{**chosen, "num_host_slots": 0})
    if not options:
        assert outcomes[-1].num_cached_tokens > without[-1].num_cached_tokens


def test_states_of_cached_pages(tmp_path: Path) -> None:
    """The device has room for all pages, but for few snapshots: only states are loaded."""
    write_checkpoint("qwen3.5", tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    tokens, num_cached = {}, {}
    for num_host_slots in (0, 400):
        with TinyEngine(
            model,
            context=CONTEXT,
            page_size=4,
            num_snapshots=4,
            num_host_slots=num_host_slots,
            num_state_slots=40,
        ) as engine:
            outcomes = [engine.run([prompt], [GREEDY]) for prompt in [*PROMPTS, *PROMPTS]]
            assert engine.num_loaded_tokens == 0
        tokens[num_host_slots] = [outcome.tokens for outcome in outcomes]
        num_cached[num_host_slots] = sum(outcome.num_cached_tokens for outcome in outcomes)
    assert tokens[0] == tokens[400]
    assert num_cached[400] > 1.5 * num_cached[0]


@pytest.mark.parametrize("case", ["qwen3", "youtu", "deepseek-v32"])
def test_tokens_over_fp8_pages(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, context=CONTEXT, dtype=torch.float64)
    num_layers = len(model.spec.all_layers)
    check_same(model, kv_dtype=torch.float8_e4m3fn, scales=[KVScale(0.25, 7.0)] * num_layers)


@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3", "qwen3.5"])
def test_tokens_with_an_mtp_layer(case: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(case, tmp_path, predictable=True)
    check_same(load_model(tmp_path, context=CONTEXT, mtp=True), mtp_tokens=3)


def test_tokens_with_an_eagle_layer(tmp_path: Path) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, PREDICTABLE, predictable=True)
    model = load_model(tmp_path / "model", context=CONTEXT, eagle=tmp_path / "eagle")
    check_same(model, mtp_tokens=3)


def test_a_prompt_that_is_scored_is_computed(tmp_path: Path) -> None:
    """Nothing of it is loaded the first time; after that, prefixes are."""
    write_checkpoint("qwen3", tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    score = SamplingParams(max_tokens=2, temperature=0.0, num_prompt_logprobs=0)
    options: dict[str, Any] = {"page_size": 4, "num_positions": 240, "num_host_slots": 200}
    with TinyEngine(model, context=CONTEXT, **options) as engine:
        engine.run(PROMPTS, [GREEDY] * len(PROMPTS))
        before = engine.num_loaded_tokens
        engine.run(PROMPTS[:1], [score])
        assert engine.num_loaded_tokens == before
        engine.run(PROMPTS, [GREEDY] * len(PROMPTS))
        assert engine.num_loaded_tokens > before
