"""An EAGLE-3 layer guesses what its reference guesses, and tokens are the same as without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from minisgl_backend.request import IntArray
from tests.conformance.checked_guesses import check_guesses
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE
from tests.conformance.eagle_checkpoints import FORMS, PREDICTABLE, write_eagle_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes
from tests.conformance.mtp_checkpoints import reference_guesses
from tests.conformance.test_mtp_guesses import OPTIONS, SAMPLING

MODELS: Final = ("qwen3", "llama", "qwen3-moe", "gpt-oss")


def prompts() -> list[IntArray]:
    return prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=len(SAMPLING)
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", [*MODELS, "qwen3.5"])
def test_tokens_are_those_without_guesses(
    case: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_eagle_checkpoint(case, tmp_path, PREDICTABLE, predictable=True)
    model = load_model(tmp_path / "model", context=CONTEXT)
    with TinyEngine(model, context=CONTEXT, **options) as engine:
        plain = engine.run(prompts(), SAMPLING)
    model = load_model(tmp_path / "model", context=CONTEXT, eagle=tmp_path / "eagle")
    with TinyEngine(model, context=CONTEXT, mtp_tokens=3, **options) as engine:
        found = engine.run(prompts(), SAMPLING)
        num_guesses, num_right = engine.num_guesses
        assert num_guesses / 5 < num_right < num_guesses
        assert (engine.num_retractions > 0) == ("num_positions" in options)
    assert found.tokens == plain.tokens


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain", "fp8 pages"])
def test_tokens_of_cached_prompts_are_the_same(
    kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, PREDICTABLE, predictable=True)
    model = load_model(tmp_path / "model", context=CONTEXT, eagle=tmp_path / "eagle")
    options: dict[str, Any] = {"page_size": 4, "kv_dtype": kv_dtype, "speculative_tokens": 5}
    with TinyEngine(model, context=CONTEXT, mtp_tokens=3, **options) as engine:
        first = engine.run(prompts(), SAMPLING)
        second = engine.run(prompts(), SAMPLING)
        assert second.num_cached_tokens > first.num_cached_tokens
        num_guesses, num_right = engine.num_guesses
        assert num_guesses / 5 < num_right < num_guesses
    assert second.tokens == first.tokens


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", MODELS)
def test_guesses_are_those_of_the_reference(case: str, form: str, tmp_path: Path) -> None:
    """Whatever the chunks, and of what the guesses before were right."""
    theirs = write_eagle_checkpoint(case, tmp_path, FORMS[form])
    model = load_model(tmp_path / "model", context=CONTEXT, eagle=tmp_path / "eagle")
    given = [prompt[-(20 + index) :] for index, prompt in enumerate(prompts())]
    check_guesses(model, given, SAMPLING, partial(reference_guesses, theirs), context=CONTEXT)
