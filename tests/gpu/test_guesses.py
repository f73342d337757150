"""Guesses on a GPU: in steps that are captured and in others, tokens are those without guesses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_backend.build import build_engine
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.request import Grammar, GrammarKind, IntArray, SamplingParams
from minisgl_backend.scheduling.report import SchedulerStats
from minisgl_bench.dummy_model import SHAPES, write_dummy_model
from minisgl_bench.engines import submitted
from tests.conformance.checkpoints import CONTEXT, write_checkpoint
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.conformance.test_guesses import FEW, GREEDY, PENALTIES, SAMPLED, undecided

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

SAMPLING = [GREEDY] * 4 + [SAMPLED] * 2
SEEDS = {
    "qwen3": 10,
    "mistral-window": 10,
    "youtu": 10,
    "qwen3.5": 15,
    "nemotron-h": 10,
    "lfm2": 10,
    "kimi-linear": 11,
}
"""Of prompts for which the best token is clear in fp32, even if attention's GEMMs round to tf32."""

WAYS: list[dict[str, Any]] = [
    {},
    {"overlap": False},
    {"cuda_graph_max_batch_size": 0},
    {"cuda_graph_max_tokens": 0},
]
"""Options with which guesses must not change a token."""


def served(
    model: Path,
    prompts: list[IntArray],
    sampling: list[SamplingParams],
    *,
    parts: Parts = STANDARD,
    **options: Any,
) -> tuple[list[list[int]], SchedulerStats]:
    """The tokens of all requests, which run at once, and the planner's counts after them."""
    chosen = {"max_running_requests": 8, "num_pages": 1024, "max_prefill_tokens": 512, **options}
    engine = build_engine(
        EngineOptions(
            model=str(model),
            device="cuda",
            max_sequence_length=CONTEXT,
            **{"dtype": "float32", **chosen},
        ),
        parts,
    )
    try:
        given = zip(prompts, sampling, strict=True)
        sinks = [submitted(engine, prompt, params) for prompt, params in given]
        for sink in sinks:
            sink.wait()
        return [sink.tokens for sink in sinks], engine.stats().scheduler
    finally:
        engine.close(drain_s=0)


@pytest.mark.parametrize("case", SEEDS)
def test_tokens_are_those_without_guesses(case: str, tmp_path: Path) -> None:
    """Of full attention, of windows, whose pages are their own, of latents, and of recurrent layers
    of each kind."""
    write_checkpoint(case, tmp_path)
    drawn = prompts_with_shared_prefixes(
        vocab_size=len(FEW), longest=60, seed=SEEDS[case], count=len(SAMPLING)
    )
    prompts = [np.array(FEW, np.int32)[prompt] for prompt in drawn]
    plain, stats = served(tmp_path, prompts, SAMPLING)
    assert stats.num_guesses == 0
    for changed in WAYS:
        tokens, stats = served(tmp_path, prompts, SAMPLING, speculative_tokens=5, **changed)
        assert tokens == plain, changed
        assert 0 < stats.num_right_guesses < stats.num_guesses


def test_tokens_with_penalties_are_those_without_guesses(tmp_path: Path) -> None:
    """What is sampled after a guess is penalized for it. In this order of the penalties the best
    tokens are clear."""
    write_checkpoint("qwen3", tmp_path)
    prompts, without = undecided()
    penalties = [*PENALTIES[1:], *PENALTIES][: len(without)]
    sampling = [replace(each, **some) for each, some in zip(without, penalties, strict=True)]
    plain, _ = served(tmp_path, prompts, sampling)
    for changed in WAYS:
        tokens, stats = served(tmp_path, prompts, sampling, speculative_tokens=5, **changed)
        assert tokens == plain, changed
        assert 0 < stats.num_right_guesses < stats.num_guesses


def test_tokens_with_grammars_are_those_without_guesses() -> None:
    """Rows with a grammar beside others. Each sample of a check has its own mask."""
    rng = np.random.default_rng(SEEDS["qwen3"])
    prompts = [rng.integers(10, 1900, 40).astype(np.int32) for _ in range(6)]
    record = {
        "type": "object",
        "properties": {"name": {"enum": ["ab", "cd"]}, "number": {"type": "integer"}},
        "required": ["name", "number"],
        "additionalProperties": False,
    }
    records = {"type": "array", "items": record, "minItems": 4}
    records["x-guidance"] = {"whitespace_flexible": False}
    forms = [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(records)),
        Grammar(GrammarKind.REGEX, "(one of several,|another one,)*"),
        None,
    ]
    sampling = [
        SamplingParams(
            max_tokens=60, temperature=index % 2, seed=index, top_k=index, grammar=forms[index % 3]
        )
        for index in range(6)
    ]
    plain, _ = served(Path(DEMO_MODEL), prompts, sampling)
    for changed in WAYS:
        tokens, stats = served(Path(DEMO_MODEL), prompts, sampling, speculative_tokens=5, **changed)
        assert tokens == plain, changed
        assert stats.num_right_guesses > 0


def test_batch_invariant_tokens_do_not_depend_on_guesses_at_all(tmp_path: Path) -> None:
    """In bf16, whose rounding would show a sum in another order."""
    folder = tmp_path / "model"
    write_dummy_model("qwen3-0.6b", folder)
    config = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 3, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(SEEDS["qwen3"])
    prompts = [rng.choice(FEW, 30 + 7 * index).astype(np.int32) for index in range(len(SAMPLING))]
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "batch_invariant": True,
        "load_format": "dummy",
    }
    plain, _ = served(folder, prompts, SAMPLING, **options)
    for changed in ({}, {"cuda_graph_max_batch_size": 0}):
        asked: dict[str, Any] = {**options, **changed, "speculative_tokens": 5}
        tokens, stats = served(folder, prompts, SAMPLING, **asked)
        assert tokens == plain, changed
        assert stats.num_right_guesses
