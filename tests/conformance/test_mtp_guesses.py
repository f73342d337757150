"""An MTP layer guesses what its reference guesses, and tokens are the same as without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_backend.request import IntArray, SamplingParams
from tests.conformance.checked_guesses import check_guesses
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes
from tests.conformance.mtp_checkpoints import reference_guesses, write_mtp_checkpoint

GREEDY: Final = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLED: Final = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
SAMPLING: Final = [GREEDY] * 6 + [SAMPLED] * 3
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "overlapped": {"page_size": 16},
    "whole": {"page_size": 1, "radix": False, "overlap": False, "chunk": 512},
    "retracted": {"page_size": 4, "num_positions": 240, "reserve_tokens": 0},
}


def prompts() -> list[IntArray]:
    return prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=len(SAMPLING)
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", ["qwen3.5", "glm4-moe", "deepseek-v3"])
def test_tokens_are_those_without_guesses(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_mtp_checkpoint(case, tmp_path, predictable=True)
    with TinyEngine(load_model(tmp_path, context=CONTEXT), context=CONTEXT, **options) as engine:
        plain = engine.run(prompts(), SAMPLING)
    model = load_model(tmp_path, context=CONTEXT, mtp=True)
    with TinyEngine(model, context=CONTEXT, mtp_tokens=3, **options) as engine:
        found = engine.run(prompts(), SAMPLING)
        num_guesses, num_right = engine.num_guesses
        assert 0 < num_right < num_guesses
        assert (engine.num_retractions > 0) == ("num_positions" in options)
    assert found.tokens == plain.tokens


@pytest.mark.parametrize("predictable", [True, False], ids=["predictable", "random"])
@pytest.mark.parametrize(
    "case",
    ["qwen3.5", "qwen3.5-experts", "glm4-moe", "deepseek-v3", "deepseek-v32", "bailing-hybrid"],
)
def test_guesses_are_those_of_the_reference(case: str, predictable: bool, tmp_path: Path) -> None:
    """Whatever the chunks, and of what the guesses before were right. A layer with random weights
    also depends on its hidden states, positions, keys and values."""
    theirs = write_mtp_checkpoint(case, tmp_path, predictable=predictable)
    model = load_model(tmp_path, context=CONTEXT, mtp=True)
    given = [prompt[-(20 + index) :] for index, prompt in enumerate(prompts())]
    reference = partial(reference_guesses, theirs)
    _, num_right = check_guesses(model, given, SAMPLING, reference, context=CONTEXT)
    assert num_right > 0 or not predictable
