"""An engine with float8 pages answers nearly like one with pages of the model's own type."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend import LLM
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import SamplingParams
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import (
    Outcome,
    TinyEngine,
    load_model,
    prompts_with_shared_prefixes,
)

PROMPTS: Final = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=3)
NEXT: Final = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=VOCAB_SIZE)
SCALES: Final = (KVScale(0.03, 0.5), KVScale(0.25, 0.03))
"""For two layers. Divided by them, the keys and values of these checkpoints fit float8's range."""
_ROUNDING: Final = 2**-4
"""The largest relative error of float8_e4m3, which has three bits after the leading one."""
_SMALLEST: Final = 2**-9
"""The smallest number that float8_e4m3 can tell from 0."""


@pytest.fixture(scope="module", params=["llama", "qwen2-window", "qwen3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp8")
    write_checkpoint(request.param, path)
    return path


def ask(
    model: Decoder, sampling: SamplingParams = NEXT, **options: Any
) -> tuple[Outcome, list[Tensor]]:
    """The answers of an engine with these options, and the numbers in the pages of each layer,
    float64 [2, num_pages + 1, page_size, num_kv_heads, head_dim]."""
    with TinyEngine(model, context=CONTEXT, **{"page_size": 16, **options}) as engine:
        outcome = engine.run(PROMPTS, [sampling] * len(PROMPTS))
        pages = [
            torch.stack(
                [kv.keys.double() * kv.scale.k, _as_wide_as(kv.keys, kv.values) * kv.scale.v]
            )
            for kv in engine.storage.layers
        ]
    return outcome, pages


def _as_wide_as(keys: Tensor, values: Tensor) -> Tensor:
    """The values, which are narrower than keys if they are latents, and zeros behind them."""
    return F.pad(values.double(), (0, keys.shape[-1] - values.shape[-1]))


def logprobs(outcome: Outcome) -> npt.NDArray[np.float64]:
    """The log-probabilities of the first tokens, [num_prompts, VOCAB_SIZE]."""
    found = np.empty((len(PROMPTS), VOCAB_SIZE))
    for line, (first,) in zip(found, outcome.logprobs, strict=True):
        for token, logprob in first.alternatives:
            line[token] = logprob
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scales", [None, SCALES], ids=["unscaled", "scaled"])
def test_logits_are_nearly_those_over_exact_pages(
    folder: Path, dtype: torch.dtype, scales: Sequence[KVScale] | None
) -> None:
    model = load_model(folder, context=CONTEXT, dtype=dtype)
    exact = logprobs(ask(model)[0])
    rounded = logprobs(ask(model, kv_dtype=torch.float8_e4m3fn, scales=scales)[0])
    # a scale used for writing but not for reading, or the reverse, gives more than 1
    assert 0 < np.abs(rounded - exact).mean() < 0.2 * exact.std()


@pytest.mark.parametrize("scales", [None, [KVScale(0.25, 7.0)] * 2], ids=["unscaled", "scaled"])
def test_latents(tmp_path: Path, scales: Sequence[KVScale] | None) -> None:
    """They have the scale of keys, since values are a part of these."""
    write_checkpoint("youtu", tmp_path)
    model = load_model(tmp_path, context=CONTEXT)
    exact = logprobs(ask(model)[0])
    rounded = logprobs(ask(model, kv_dtype=torch.float8_e4m3fn, scales=scales)[0])
    assert 0 < np.abs(rounded - exact).mean() < 0.2 * exact.std()


def test_pages_hold_the_numbers_divided_by_the_scales(folder: Path) -> None:
    model = load_model(folder, context=CONTEXT)
    (exact, *_) = ask(model, radix=False)[1]
    (rounded, *_) = ask(model, radix=False, kv_dtype=torch.float8_e4m3fn, scales=SCALES)[1]
    scale = torch.tensor([SCALES[0].k, SCALES[0].v]).double().view(2, 1, 1, 1, 1)
    is_written = exact != exact[0, -2, -1, -1, -1]  # else as the pages were filled
    assert is_written.sum() > 10_000
    apart = (rounded - exact).abs()
    assert (apart <= exact.abs() * _ROUNDING + scale * _SMALLEST)[is_written].all()


def test_tokens_do_not_depend_on_chunks_pages_or_the_cache(folder: Path) -> None:
    model = load_model(folder, context=CONTEXT, dtype=torch.float64)
    drawn = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=5)
    fp8 = {"kv_dtype": torch.float8_e4m3fn, "scales": SCALES}
    expected = ask(model, drawn, radix=False, chunk=2048, **fp8)[0]
    for options in (
        {"radix": True, "chunk": 7},
        {"radix": True, "page_size": 1},
        {"radix": False, "num_positions": 256},
        {"radix": True, "num_positions": 256, "overlap": False},
    ):
        assert ask(model, drawn, **options, **fp8)[0].tokens == expected.tokens


def test_chosen_positions_do_not_depend_on_chunks_pages_or_the_cache(tmp_path: Path) -> None:
    """Index keys are rounded, too, so it is others that are chosen, but always the same."""
    write_checkpoint("deepseek-v32", tmp_path)
    model = load_model(tmp_path, context=CONTEXT, dtype=torch.float64)
    fp8 = {"kv_dtype": torch.float8_e4m3fn, "scales": [KVScale(0.25, 7.0)] * 3}
    expected = ask(model, NEXT, radix=False, chunk=2048, **fp8)[0]
    for options in ({"radix": True, "chunk": 7}, {"radix": True, "page_size": 1}):
        assert ask(model, NEXT, **options, **fp8)[0].tokens == expected.tokens
    assert ask(model)[0].tokens != expected.tokens


def test_the_scales_of_a_checkpoint_are_those_of_its_pages(tmp_path: Path) -> None:
    """With sensible scales, the demo model knows what it knew; with scales far too small, all keys
    and values become almost nothing."""
    prompts = ["The capital of France is", "What is the emoji for a fox?"]
    params = {"temperature": 0, "max_tokens": 8, "num_logprobs": 0}
    answers = []
    cases = (("none", None, None), ("sensible", 0.06, "fp8"), ("small", 1e-6, "fp8_e4m3"))
    for name, scale, kv_cache_dtype in cases:
        shutil.copytree(DEMO_MODEL, tmp_path / name)
        weights = tmp_path / name / "model.safetensors"
        tensors = load_file(weights)
        if scale is not None:
            for layer in range(4):
                attention = f"model.layers.{layer}.self_attn"
                tensors[f"{attention}.k_scale"] = torch.tensor(scale)
                tensors[f"{attention}.v_scale"] = torch.tensor(scale)
        save_file(tensors, weights, {"format": "pt"})
        with LLM(tmp_path / name, device="cpu", num_pages=64, kv_cache_dtype=kv_cache_dtype) as llm:
            answers.append(llm.generate(prompts, params))
    exact, sensible, small = ([one.token_ids for one in answer] for answer in answers)
    assert sensible == exact
    assert all(found != expected for found, expected in zip(small, exact, strict=True))
