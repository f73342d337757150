"""Models with recurrent layers on a GPU: as in ``test_executor``, and the states of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_bench.engines import submitted
from tests.conformance.checkpoints import (
    CONTEXT,
    VOCAB_SIZE,
    write_broad_conv_checkpoint,
    write_broad_hybrid_checkpoint,
    write_broad_mamba_checkpoint,
    write_checkpoint,
)
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.gpu.test_executor import GREEDY, POISON, equal_prompts, serve, shortfalls, tokens_of

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

BROAD: dict[str, Any] = {"attention_backend": "triton"}
"""Other backends may lack kernels for heads of 256 dimensions."""
DENSE = [
    *("qwen3.5", "qwen3.5-tied", "qwen3.5-multimodal"),
    # not granite-hybrid-dense: older versions of transformers normalize its groups together
    *("nemotron-h", "nemotron-h-biases", "bamba"),
    *("falcon-h1", "falcon-h1-norm", "lfm2", "lfm2-biases", "lfm3"),
    *("olmo-hybrid", "olmo-hybrid-rotating"),
]
EXPERTS = [
    *("qwen3.5-experts", "qwen3.5-experts-multimodal", "qwen3-next", "qwen3-next-sparse"),
    *("nemotron-h-experts", "nemotron-h-latent", "granite-hybrid", "lfm2-moe"),
    *("kimi-linear", "kimi-linear-queries", "bailing-hybrid", "bailing-v3"),
]


def written(case: str, folder: Path) -> Any:
    """The checkpoint of ``case``, or one in the sizes of publishers' heads."""
    if case in ("broad-nemotron", "broad-granite"):
        return write_broad_mamba_checkpoint(folder, granite=case == "broad-granite")
    if case == "broad-lfm2":
        return write_broad_conv_checkpoint(folder)
    if case.startswith("broad"):
        return write_broad_hybrid_checkpoint(folder, experts=case == "broad-experts")
    return write_checkpoint(case, folder)


@pytest.fixture(scope="module")
def prompts() -> list[IntArray]:
    return prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)


@pytest.mark.parametrize("case", [*DENSE, *EXPERTS])
def test_tokens_in_fp32(case: str, prompts: list[IntArray], tmp_path: Path) -> None:
    """In fp32 (attention's GEMMs in tf32), rounding moves only tokens that tie."""
    reference = write_checkpoint(case, tmp_path).float()
    sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, dtype="float32")
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.02
    assert below.max() < 0.05


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("qwen3.5", {}),
        ("qwen3.5-tied", {"page_size": 64}),
        ("qwen3.5-multimodal", {"cache": "naive"}),
        ("broad", BROAD),
        ("broad", {**BROAD, "cache": "naive"}),
        ("broad", {**BROAD, "state_dtype": "float16"}),
        ("broad", {**BROAD, "state_dtype": "bfloat16"}),
        ("broad-experts", BROAD),
        ("broad-experts", {**BROAD, "state_dtype": "float16"}),
        ("broad-nemotron", BROAD),
        ("broad-nemotron", {**BROAD, "cache": "naive", "state_dtype": "bfloat16"}),
        ("broad-granite", BROAD),
        ("broad-granite", {**BROAD, "state_dtype": "float16"}),
        ("broad-lfm2", {}),
        ("broad-lfm2", {"cache": "naive"}),
    ],
)
def test_tokens_in_bf16(
    case: str, options: dict[str, Any], prompts: list[IntArray], tmp_path: Path
) -> None:
    """Chunks of 64 tokens run beside decoding rows; snapshots are restored.

    The norm of what a head reads magnifies the rounding of small states, even on a CPU: a few
    tokens may be off by more than in ``test_executor``. It may also choose other experts; then, on
    a CPU, a quarter of the tokens are off.
    """
    check_tokens_in_bf16(case, options, prompts, tmp_path)


@pytest.mark.parametrize("state_dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", ["broad", "broad-nemotron", "broad-granite"])
def test_tokens_with_pending_updates(
    case: str,
    state_dtype: str,
    prompts: list[IntArray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same with the kernels for decode steps of many rows, from a few rows on."""
    kernels = "minisgl_backend.kernels"
    monkeypatch.setattr(f"{kernels}.cuda.delta_step._LEAST_STATES", 8)
    row_bytes = 16 * 80 * 128 * (4 if state_dtype == "float32" else 2)  # at most
    monkeypatch.setattr(f"{kernels}.mamba._MANY_BYTES", 2 * row_bytes)
    check_tokens_in_bf16(case, {**BROAD, "state_dtype": state_dtype}, prompts, tmp_path)


def check_tokens_in_bf16(
    case: str, options: dict[str, Any], prompts: list[IntArray], folder: Path
) -> None:
    reference = written(case, folder).bfloat16().float()
    sinks = serve(folder, prompts, max_sequence_length=CONTEXT, **options)
    assert [len(sink.tokens) for sink in sinks] == [24] * len(prompts)
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    most, mean = (0.35, 0.12) if case == "broad-experts" else (0.15, 0.02)
    assert np.mean(below > 0) < most
    assert below.mean() < mean


@pytest.mark.parametrize(
    ("case", "count", "state_dtype"),
    [
        ("broad", 1, None),
        ("broad", 8, None),
        ("broad", 8, "float16"),
        ("broad-experts", 1, None),
        ("broad-experts", 8, None),
        ("broad-nemotron", 1, None),
        ("broad-nemotron", 8, "float16"),
        ("broad-granite", 1, None),
        ("broad-granite", 8, None),
        ("broad-lfm2", 1, None),
        ("broad-lfm2", 8, None),
        ("olmo-hybrid", 1, None),
        ("kimi-linear", 8, None),
        ("bailing-v3", 8, None),
        ("kimi-linear", 8, "float16"),
    ],
)
def test_graphs_give_what_launches_give(
    case: str, count: int, state_dtype: str | None, tmp_path: Path
) -> None:
    """The same kernels over the same batch sizes, so the tokens are equal, drawn ones too."""
    written(case, tmp_path)
    sampling = [
        SamplingParams(max_tokens=40, temperature=index % 2, seed=index, ignore_eos=True)
        for index in range(count)
    ]
    results = [
        tokens_of(
            serve(
                tmp_path,
                equal_prompts(count),
                sampling,
                max_sequence_length=CONTEXT,
                max_prefill_tokens=1024,
                state_dtype=state_dtype,
                **BROAD,
                **options,
            )
        )
        for options in (
            {},
            {"overlap": False},
            {"cuda_graph_max_batch_size": 0},
            {"cuda_graph_batch_sizes": f"{count}"},
        )
    ]
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.parametrize(
    ("case", "state_dtype"),
    [("broad", None), ("broad", "float16"), ("broad-nemotron", None), ("broad-granite", None)],
)
def test_conversations_go_on_from_snapshots(
    case: str, state_dtype: str | None, tmp_path: Path
) -> None:
    """Each turn has the whole conversation as its prompt. States are kept between replays of
    captured decode steps."""
    reference = written(case, tmp_path).bfloat16().float()
    options = EngineOptions(
        model=str(tmp_path),
        device="cuda",
        max_sequence_length=CONTEXT,
        num_pages=256,
        state_dtype=state_dtype,
        attention_backend=BROAD["attention_backend"],
    )
    engine = build_engine(options)
    rng, history = np.random.default_rng(5), np.empty(0, np.int32)
    cached, prompts, answers = [], [], []
    try:
        for _ in range(5):
            said = rng.integers(0, VOCAB_SIZE, 21).astype(np.int32)
            prompt = np.concatenate([history, said])
            sink = submitted(engine, prompt, GREEDY)
            sink.wait()
            assert sink.error is None
            cached.append(sink.num_cached_tokens)
            prompts.append(prompt)
            answers.append(sink.tokens)
            history = np.concatenate([prompt, np.array(sink.tokens, np.int32)])
    finally:
        engine.close(drain_s=0)
    assert cached[0] == 0
    for before, found in zip(prompts[:-1], cached[1:], strict=True):
        # the last token of an answer is not computed, and its step keeps no states
        assert found >= len(before) + len(answers[0]) - options.page_size - 1
    below = np.array(shortfalls(reference, prompts, answers))
    assert np.mean(below > 0) < 0.15
    assert below.mean() < 0.02


@pytest.mark.parametrize(
    ("case", "embedding"),
    [("qwen3.5", "model.embed_tokens"), ("nemotron-h", "backbone.embeddings")],
)
def test_states_of_a_failed_request_touch_no_other(
    case: str, embedding: str, tmp_path: Path
) -> None:
    """A token whose embedding is NaN leaves NaN in its row's states, and perhaps in snapshots."""
    reference = write_checkpoint(case, tmp_path).bfloat16().float()
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{embedding}.weight"][POISON] = torch.nan
    save_file(tensors, path)
    options = EngineOptions(
        model=str(tmp_path),
        device="cuda",
        max_sequence_length=CONTEXT,
        max_running_requests=1,
        num_pages=64,
    )
    engine = build_engine(options)
    healthy = np.arange(10, 90, dtype=np.int32)
    try:
        for poisoned in (np.full(100, POISON, np.int32), np.append(healthy, POISON)):
            failed = submitted(engine, poisoned.astype(np.int32), GREEDY)
            assert failed.done.wait(120)
            assert failed.error is not None
            sink = submitted(engine, healthy, GREEDY)
            sink.wait()
            below = np.array(shortfalls(reference, [healthy], [sink.tokens]))
            assert np.mean(below > 0) < 0.15
            assert below.mean() < 0.02
    finally:
        engine.close(drain_s=0)
