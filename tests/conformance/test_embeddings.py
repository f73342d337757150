"""Embeddings equal those of transformers, whatever else the engine is doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import Adapter, IntArray, SamplingParams
from minisgl_kit.adapters import write_adapter
from tests.conformance.adapter_folders import merged
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes

EMBEDDED = SamplingParams(max_tokens=0, embed=True)
GENERATED = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module", params=["qwen3", "granite", "olmo2"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Decoder, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_checkpoint(request.param, folder)
    return load_model(folder, context=CONTEXT), theirs


def reference(model: Any, prompt: IntArray) -> Tensor:
    """float32[hidden_size], as sentence-transformers makes it for Qwen3-Embedding."""
    with torch.inference_mode():
        states = model.model(torch.from_numpy(prompt).long()[None]).last_hidden_state
    return F.normalize(states[0, -1], dim=-1)


def test_embeddings_with_an_adapter(tmp_path: Path) -> None:
    theirs = write_checkpoint("qwen3", tmp_path)
    spec = load_spec(tmp_path)
    path = write_adapter(tmp_path / "adapter", spec, rank=8, seed=1)
    ours = load_model(tmp_path, context=CONTEXT)
    slots = AdapterSlots(ours, 1, 8, torch.device("cpu"))
    store = AdapterStore(slots, pinned=False)
    adapter = Adapter(1, "adapter", str(path), store.read(1, path))
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=3)
    picks = [adapter if index % 2 else None for index in range(len(prompts))]
    with TinyEngine(
        ours, page_size=4, context=CONTEXT, adapter_slots=slots, adapter_store=store
    ) as engine:
        outcome = engine.run(prompts, [EMBEDDED] * len(prompts), picks)
    for index, (prompt, pick) in enumerate(zip(prompts, picks, strict=True)):
        expected = reference(theirs if pick is None else merged(theirs, path), prompt)
        found = torch.from_numpy(outcome.embeddings[index])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"overlap": True, "chunk": 7}, {"radix": False}])
def test_embeddings_beside_generations(
    models: tuple[Decoder, Any], options: dict[str, Any]
) -> None:
    """Chunks are cut everywhere; the second run finds the prompts in the cache."""
    ours, theirs = models
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=3)
    sampling = [EMBEDDED if index % 3 else GENERATED for index in range(len(prompts))]
    expected = {i: reference(theirs, p) for i, p in enumerate(prompts) if sampling[i].embed}
    with TinyEngine(ours, page_size=4, context=CONTEXT, **options) as engine:
        outcomes = [engine.run(prompts, sampling) for _ in range(2)]
    for outcome in outcomes:
        assert outcome.embeddings.keys() == expected.keys()
        for index, vector in outcome.embeddings.items():
            torch.testing.assert_close(torch.from_numpy(vector), expected[index], atol=1e-5, rtol=0)
            assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
            assert outcome.tokens[index] == []
        assert all(len(outcome.tokens[i]) == 12 for i in range(len(prompts)) if i not in expected)
    if options.get("radix", True):
        assert outcomes[1].num_cached_tokens > outcomes[0].num_cached_tokens
