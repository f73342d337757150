"""An engine with 16-bit recurrent states answers nearly like one with states in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch

from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import IntArray, SamplingParams
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import (
    Outcome,
    TinyEngine,
    load_model,
    prompts_with_shared_prefixes,
)

PROMPTS: Final = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7, count=12)
SAMPLING: Final = SamplingParams(max_tokens=16, temperature=0.0, num_logprobs=VOCAB_SIZE)


@dataclass(frozen=True)
class Answers:
    """The answers of a model with states in float32."""

    model: Decoder
    outcome: Outcome


@pytest.fixture(scope="module", params=["qwen3.5", "nemotron-h", "kimi-linear"])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("states")
    write_checkpoint(request.param, folder)
    model = load_model(folder, context=CONTEXT)
    with TinyEngine(model, page_size=16, context=CONTEXT) as engine:
        return Answers(model, ask(engine))


def ask(engine: TinyEngine, prompts: list[IntArray] = PROMPTS) -> Outcome:
    return engine.run(prompts, [SAMPLING] * len(prompts))


def logprobs(outcome: Outcome, index: int) -> npt.NDArray[np.float64]:
    """The log-probabilities of one answer, [num_tokens, VOCAB_SIZE]."""
    tokens = outcome.logprobs[index]
    found = np.empty((len(tokens), VOCAB_SIZE))
    for line, token in zip(found, tokens, strict=True):
        for candidate, logprob in token.alternatives:
            line[candidate] = logprob
    return found


def distance(exact: Outcome, outcome: Outcome) -> float:
    """The mean difference of log-probabilities, up to the first token that differs."""
    apart = []
    for index, (expected, found) in enumerate(zip(exact.tokens, outcome.tokens, strict=True)):
        assert len(expected) == len(found)
        differs = [a != b for a, b in zip(expected, found, strict=True)]
        end = 1 + (differs.index(True) if any(differs) else len(found))
        apart.append(np.abs(logprobs(exact, index)[:end] - logprobs(outcome, index)[:end]))
    return float(np.concatenate(apart).mean())


@pytest.mark.parametrize(
    ("state_dtype", "most", "pressure"),
    [
        (torch.float16, 0.01, {}),
        (torch.float16, 0.01, {"num_positions": 160, "reserve_tokens": 1}),
        (torch.bfloat16, 0.05, {}),
    ],
    ids=["float16", "float16-retracted", "bfloat16"],
)
def test_answers_are_nearly_those_with_float32(
    exact: Answers, state_dtype: torch.dtype, most: float, pressure: dict[str, Any]
) -> None:
    """With a cold cache and a warm one; logits have a spread of 4."""
    with TinyEngine(
        exact.model, page_size=16, context=CONTEXT, state_dtype=state_dtype, **pressure
    ) as engine:
        for _ in range(2):
            outcome = ask(engine)
            assert 0 < distance(exact.outcome, outcome) < most
            assert outcome.num_cached_tokens > 0
        assert (engine.num_retractions > 0) == bool(pressure)


@pytest.mark.parametrize("state_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_snapshot_at_the_end_of_a_chunk_gives_what_the_row_gives(
    exact: Answers, state_dtype: torch.dtype
) -> None:
    """States are rounded there anyway, so all log-probabilities are equal."""
    first, second = (np.concatenate([PROMPTS[0][:64], PROMPTS[index][:9]]) for index in (2, 5))
    outcomes = []
    for radix in (True, False):
        with TinyEngine(
            exact.model,
            page_size=16,
            context=CONTEXT,
            chunk=64,
            radix=radix,
            state_dtype=state_dtype,
        ) as engine:
            ask(engine, [first])
            outcomes.append(ask(engine, [second]))
    cached, computed = outcomes
    assert (cached.num_cached_tokens, computed.num_cached_tokens) == (64, 0)
    assert np.array_equal(logprobs(cached, 0), logprobs(computed, 0))
