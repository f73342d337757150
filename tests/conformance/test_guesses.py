"""Tokens are the same with guesses as without, and greedy ones those of transformers.

Rows sample from three tokens only, so that what they say repeats itself; some guesses are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.request import Adapter, IntArray, SamplingParams
from minisgl_kit.adapters import write_adapter
from tests.conformance.adapter_folders import merged
from tests.conformance.checkpoints import CONTEXT, write_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes

FEW: Final = (10, 11, 12)
GREEDY: Final = SamplingParams(
    max_tokens=40, temperature=0.0, logit_bias=tuple((token, 100.0) for token in FEW)
)
SAMPLED: Final = replace(GREEDY, temperature=1.0, top_p=0.9, seed=5)
SAMPLING: Final = [GREEDY] * 6 + [SAMPLED] * 3
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "overlapped": {"page_size": 16},
    "whole": {"page_size": 1, "radix": False, "overlap": False, "chunk": 512},
    "retracted": {"page_size": 4, "num_positions": 240, "reserve_tokens": 0},
}
FULL: Final = ("qwen3", "mistral-window", "qwen3.5", "nemotron-h", "lfm2")
"""Cases that run with all ``OPTIONS``."""
OTHERS: Final = (
    *("gpt-oss", "llama4", "deepseek-v2", "qwen3-moe"),
    *("kimi-linear", "qwen3-next", "olmo-hybrid", "granite-hybrid", "deepseek-v32"),
)
"""Window pages of half the layers, sections, latents and experts; recurrent states beside latents,
and of each of the remaining kinds; chosen positions."""
BY_NIGHT: Final = (
    *("apertus", "cohere2", "deepseek-v3", "ernie-moe", "exaone4", "gemma2", "gemma3"),
    *("gemma4-per-layer", "glm4", "granite-moe", "kolibri1", "laguna", "llama", "minimax-m2"),
    *("mistral4", "olmo3", "phi3", "qwen2-moe", "smollm3", "starcoder2"),
    *("bailing-hybrid", "bamba", "falcon-h1", "lfm2-moe", "nemotron-h-experts"),
    "qwen3.5-experts",
)


def runs() -> list[Any]:
    """Runs of ``test_tokens_are_those_without_guesses``."""
    first = OPTIONS["overlapped"]
    return [
        *(
            pytest.param(case, options, id=f"{case}-{name}")
            for case in FULL
            for name, options in OPTIONS.items()
        ),
        *(pytest.param(case, first, id=case) for case in OTHERS),
        *(pytest.param(case, first, id=case, marks=pytest.mark.nightly) for case in BY_NIGHT),
    ]


def prompts() -> list[IntArray]:
    """Of ``FEW`` tokens, with shared prefixes."""
    drawn = prompts_with_shared_prefixes(
        vocab_size=len(FEW), longest=60, seed=7, count=len(SAMPLING)
    )
    return [np.array(FEW, np.int32)[prompt] for prompt in drawn]


def assert_best(theirs: Any, prompt: IntArray, tokens: Sequence[int]) -> None:
    """To transformers each token is clearly the best of ``FEW`` after those before it."""
    ids = torch.tensor([[*prompt.tolist(), *tokens[:-1]]])
    with torch.inference_mode():
        logits = theirs(ids, attention_mask=torch.ones_like(ids)).logits
    logits = logits[0, len(prompt) - 1 :, list(FEW)]
    assert [FEW[index] for index in logits.argmax(dim=-1).tolist()] == tokens
    best, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
    assert (best - second).min() > 1e-4, "a near tie: the prompts' seed does not serve the test"


def assert_some_right(engine: TinyEngine) -> None:
    num_guesses, num_right = engine.num_guesses
    assert 0 < num_right < num_guesses


@pytest.mark.parametrize(("case", "options"), runs())
def test_tokens_are_those_without_guesses(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    with TinyEngine(model, context=CONTEXT, **options) as engine:
        plain = engine.run(prompts(), SAMPLING)
    with TinyEngine(model, context=CONTEXT, speculative_tokens=5, **options) as engine:
        found = engine.run(prompts(), SAMPLING)
        assert_some_right(engine)
        assert (engine.num_retractions > 0) == ("num_positions" in options)
    assert found.tokens == plain.tokens
    for prompt, sampling, tokens in zip(prompts(), SAMPLING, found.tokens, strict=True):
        if sampling is GREEDY:
            assert_best(theirs, prompt, tokens)


PENALTIES: Final[list[dict[str, Any]]] = [
    {"frequency_penalty": 0.2},
    {"presence_penalty": 2.0},
    {"presence_penalty": -2.0, "stop_token_ids": FEW[:1], "min_tokens": 30},
    {"repetition_penalty": 3.0},
    {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.1},
]


def undecided() -> tuple[list[IntArray], list[SamplingParams]]:
    """Prompts, and requests that choose from six tokens, so that penalties matter. Every other one
    is greedy. Not all of the six are in the prompts."""
    six = tuple((token, 100.0) for token in range(10, 16))
    return [np.array(FEW * count, np.int32) for count in range(1, 9)], [
        SamplingParams(max_tokens=40, temperature=index % 2, seed=index, logit_bias=six)
        for index in range(8)
    ]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *(pytest.param("qwen3", options, id=name) for name, options in OPTIONS.items()),
        pytest.param("qwen3.5", OPTIONS["overlapped"], id="states"),
    ],
)
def test_tokens_of_rows_with_penalties(
    case: str, options: dict[str, Any], penalties: dict[str, Any], tmp_path: Path
) -> None:
    write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    given, without = undecided()
    sampling = [replace(each, **penalties) for each in without]
    with TinyEngine(model, context=CONTEXT, **options) as engine:
        plain = engine.run(given, sampling)
        assert plain.tokens != engine.run(given, without).tokens
    with TinyEngine(model, context=CONTEXT, speculative_tokens=5, **options) as engine:
        found = engine.run(given, sampling)
        assert_some_right(engine)
    assert found.tokens == plain.tokens


def test_tokens_of_adapters(tmp_path: Path) -> None:
    """Rows have one of two adapters, or none."""
    theirs = write_checkpoint("qwen3", tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    slots = AdapterSlots(model, 2, 8, torch.device("cpu"))
    store = AdapterStore(slots, pinned=False)
    adapters: list[Adapter | None] = [None]
    models = [theirs]
    for number in (1, 2):
        path = write_adapter(tmp_path / f"{number}", model.spec, rank=4 * number, seed=number)
        adapters.append(Adapter(number, path.name, str(path), store.read(number, path)))
        models.append(merged(theirs, path))
    picks = [index % 3 for index in range(len(SAMPLING))]
    with TinyEngine(
        model,
        context=CONTEXT,
        page_size=16,
        speculative_tokens=5,
        adapter_slots=slots,
        adapter_store=store,
    ) as engine:
        found = engine.run(prompts(), SAMPLING, [adapters[pick] for pick in picks])
        assert_some_right(engine)
    given = zip(prompts(), SAMPLING, picks, found.tokens, strict=True)
    for prompt, sampling, pick, tokens in given:
        if sampling is GREEDY:
            assert_best(models[pick], prompt, tokens)


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h", "lfm2"])
def test_the_next_turn_goes_on_from_states_beside_guesses(
    case: str, page_size: int, tmp_path: Path
) -> None:
    """They are kept while a row's guesses are checked, and hold no guess."""
    theirs = write_checkpoint(case, tmp_path)
    model, greedy = load_model(tmp_path, context=CONTEXT), [GREEDY]
    prompt = prompts()[0]
    with TinyEngine(model, context=CONTEXT, page_size=page_size, speculative_tokens=5) as engine:
        said = engine.run([prompt], greedy).tokens[0]
        assert_some_right(engine)
        turn = np.array([*prompt, *said, *FEW], np.int32)
        found = engine.run([turn], greedy)
    assert found.num_cached_tokens > len(prompt) + len(said) // 2
    assert_best(theirs, turn, found.tokens[0])


def test_logprobs_are_those_without_guesses(tmp_path: Path) -> None:
    """Each token has its own, whether it was guessed or not."""
    write_checkpoint("qwen3", tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    sampling = [replace(each, num_logprobs=2) for each in SAMPLING]
    with TinyEngine(model, context=CONTEXT, page_size=16) as engine:
        plain = engine.run(prompts(), sampling)
    with TinyEngine(model, context=CONTEXT, page_size=16, speculative_tokens=5) as engine:
        found = engine.run(prompts(), sampling)
        assert_some_right(engine)
    assert found.tokens == plain.tokens
    for of_request, expected in zip(found.logprobs, plain.logprobs, strict=True):
        assert len(of_request) == GREEDY.max_tokens
        assert [each.rank for each in of_request] == [each.rank for each in expected]
        assert [each.logprob for each in of_request] == pytest.approx(
            [each.logprob for each in expected], abs=1e-4
        )
