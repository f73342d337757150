"""Log-probabilities of prompts equal those of transformers, however the prompts are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import IntArray, PromptLogprobs, SamplingParams
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import (
    TinyEngine,
    load_model,
    prompts_with_shared_prefixes,
)

NUM_TOP: Final = 5
SCORE: Final = SamplingParams(max_tokens=0, num_prompt_logprobs=NUM_TOP)
CONTINUE: Final = SamplingParams(max_tokens=4, temperature=0.0, num_prompt_logprobs=0)
PLAIN: Final = SamplingParams(max_tokens=4, temperature=0.0)


@dataclass(frozen=True)
class Reference:
    """A model, prompts, and the log-probabilities that transformers gives to every token."""

    model: Decoder
    prompts: list[IntArray]
    logprobs: list[Tensor]
    """float32 [num_prompt_tokens - 1, vocab_size] each."""


@pytest.fixture(scope="module", params=["granite-tied", "qwen2-window", "qwen3"])
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    theirs: Any = write_checkpoint(request.param, folder)
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=3, count=9)
    prompts[0] = prompts[0][:1]
    logprobs = []
    for prompt in prompts:
        with torch.inference_mode():
            logits = theirs(torch.from_numpy(prompt).long().unsqueeze(0)).logits[0, :-1]
        logprobs.append(logits.log_softmax(dim=-1))
    return Reference(load_model(folder, context=CONTEXT), prompts, logprobs)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "chunk": 7, "scored_at_once": 3},
        {"page_size": 16, "chunk": 32, "scored_at_once": 1024},
        {"page_size": 16, "chunk": 200, "scored_at_once": 16, "overlap": False},
        {"page_size": 64, "chunk": 1, "scored_at_once": 1},
        {"page_size": 4, "chunk": 50, "scored_at_once": 8, "radix": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_logprobs_are_those_of_transformers(reference: Reference, options: dict[str, Any]) -> None:
    """Cold and warm caches, chunks cut everywhere, with and without tokens after the prompt."""
    count = len(reference.prompts)
    sampling = [(SCORE, CONTINUE, PLAIN)[index % 3] for index in range(count)]
    with TinyEngine(reference.model, context=CONTEXT, **options) as engine:
        cold = engine.run(reference.prompts, sampling)
        warm = engine.run(reference.prompts, sampling[1:] + sampling[:1])
        plain = engine.run(reference.prompts, [PLAIN] * count)
    for outcome, asked in ((cold, sampling), (warm, sampling[1:] + sampling[:1])):
        for index, params in enumerate(asked):
            told = outcome.prompt_logprobs[index]
            if params is PLAIN:
                assert not told
            else:
                assert_equal(told, reference, index, params.num_prompt_logprobs or 0)
            expected = plain.tokens[index] if params.max_tokens else []
            assert outcome.tokens[index] == expected


def test_a_scored_prompt_leaves_its_pages_to_others(reference: Reference) -> None:
    prompts = reference.prompts[1:2]
    pages = (len(prompts[0]) - 1) // 4
    with TinyEngine(reference.model, context=CONTEXT, page_size=4) as engine:
        assert engine.run(prompts, [SCORE]).num_cached_tokens == 0
        assert engine.run(prompts, [SCORE]).num_cached_tokens == 0
        assert engine.run(prompts, [PLAIN]).num_cached_tokens == pages * 4


def test_prompts_come_back_where_they_were_scored(reference: Reference) -> None:
    """With pages for only some of the requests, they are retracted, even in mid-prompt."""
    sampling = SamplingParams(max_tokens=60, temperature=0.0, num_prompt_logprobs=2)
    count = len(reference.prompts)
    with TinyEngine(
        reference.model,
        context=CONTEXT,
        page_size=1,
        chunk=5,
        num_positions=200,
        reserve_tokens=0,
    ) as engine:
        outcome = engine.run(reference.prompts, [sampling] * count)
        assert engine.num_retractions > 0
    for index in range(count):
        assert_equal(outcome.prompt_logprobs[index], reference, index, 2)


def assert_equal(
    told: list[PromptLogprobs], reference: Reference, index: int, num_top: int
) -> None:
    """Each prompt token except the first comes once, in order, equal within float32 rounding."""
    expected, prompt = reference.logprobs[index], reference.prompts[index]
    token_ids = np.concatenate([np.empty(0, np.int32), *(part.token_ids for part in told)])
    assert token_ids.tolist() == prompt[1:].tolist()
    if len(prompt) == 1:
        return
    logprobs = torch.from_numpy(np.concatenate([part.logprobs for part in told]))
    of_tokens = expected.gather(1, torch.from_numpy(prompt[1:]).long().unsqueeze(1))
    torch.testing.assert_close(logprobs, of_tokens.squeeze(1), rtol=1e-5, atol=2e-5)
    ranks = (expected > of_tokens).sum(dim=-1) + 1
    assert np.concatenate([part.ranks for part in told]).tolist() == ranks.tolist()
    top = expected.topk(num_top, dim=-1)
    alternatives = torch.from_numpy(np.concatenate([part.alternatives for part in told]))
    torch.testing.assert_close(alternatives, top.values, rtol=1e-5, atol=2e-5)
    ids = np.concatenate([part.alternative_ids for part in told])
    assert ids.tolist() == top.indices.tolist()
