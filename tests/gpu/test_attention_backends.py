"""Every attention backend of a GPU against PyTorch's scaled dot product, sequence by sequence.

A backend is a line of ``BACKENDS``: its name and the shapes that it is tried with. Backends of
libraries that compile a kernel for each shape are tried with fewer shapes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.attention.base import PagedAttention, ScheduledDecode
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.request import IntArray
from tests.conformance.checkpoints import (
    CONTEXT,
    VOCAB_SIZE,
    write_broad_checkpoint,
    write_broad_indexer_checkpoint,
    write_broad_latents_checkpoint,
)
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.gpu.paged import Case, Decoding, Prompts, assert_tokens_close
from tests.gpu.test_executor import serve, shortfalls, tokens_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:::flashinfer"),
    pytest.mark.filterwarnings("ignore:::tvm_ffi"),
]

GROUPS = (1, 2, 4, 5, 8)
FULL = [
    *(Case(*of, 128) for of in product((1, 16, 64), GROUPS)),
    *(Case(*of, 64) for of in [*product((16,), GROUPS), (1, 2), (64, 8)]),
]
UNEVEN = [Case(16, group, 128) for group in (3, 6, 7)]
WINDOWS = [Case(*of, window=50) for of in [(1, 2, 64), (16, 4, 128), (16, 5, 64), (64, 8, 128)]]
WHOLE = [*FULL, *WINDOWS]
FEWER = [*FULL, Case(16, 2, 128, window=50)]
FEWEST = [
    Case(16, 1, 128),
    Case(16, 2, 64),
    Case(32, 4, 128),
    Case(64, 8, 64),
    Case(64, 5, 128),
    Case(16, 2, 128, window=50),
]
ODD = [Case(16, 2, 96), Case(1, 1, 80), Case(64, 8, 24, window=50), Case(16, 4, 512)]
WIDE = [Case(16, 8, 256), Case(64, 6, 256, window=50), Case(16, 4, 256, fp8=True)]
FP8 = [Case(*of, 128, fp8=True) for of in product((1, 16, 64), (2, 8))]
FEWEST_FP8 = [Case(16, 2, 128, fp8=True), Case(64, 8, 128, fp8=True)]
ODD_FP8 = [Case(16, 4, 96, fp8=True)]
SINKS = [
    Case(16, 8, 64, sinks=True),
    Case(16, 8, 64, window=50, sinks=True),
    Case(64, 2, 128, sinks=True),
]
SECTIONS = [
    Case(16, 5, 128, window=128, sections=True),
    Case(64, 4, 64, window=64, sections=True),
]
LATENTS = [
    Case(16, 20, 576, latent_dim=512),
    Case(64, 16, 576, latent_dim=512),
    Case(64, 128, 576, latent_dim=512),
    Case(16, 64, 320, latent_dim=256),
    Case(1, 64, 576, latent_dim=512),
    Case(1, 5, 56, latent_dim=40),
]
"""The heads of GLM-4.7-Flash, of DeepSeek-V3 on eight GPUs and on one, and others; of GLM-5 over
chosen positions."""
FP8_LATENTS = [
    Case(16, 20, 576, fp8=True, latent_dim=512),
    Case(64, 64, 576, fp8=True, latent_dim=512),
]
CAPPED = [
    Case(16, 2, 256, cap=0.7),
    Case(16, 2, 256, window=50, cap=0.7),
    Case(64, 8, 128, fp8=True, cap=0.7),
]
FP8_SINKS = [Case(16, 8, 64, window=50, fp8=True, sinks=True)]

IN_TILES = [
    case for case in [*WHOLE, *FP8, *SINKS, *SECTIONS, *FP8_SINKS] if case.page_size % 16 == 0
]

BACKENDS = {
    "cuda": [*IN_TILES, *WIDE],
    "triton": [
        *[*WHOLE, *UNEVEN, *ODD, *FP8, *ODD_FP8, *SINKS, *SECTIONS, *FP8_SINKS],
        *[*LATENTS, *FP8_LATENTS, *CAPPED],
    ],
    "fa": [*WHOLE, *SINKS, *SECTIONS, *LATENTS[:5]],
    "fi": [*FEWER, *FP8, *SINKS, *SECTIONS, *FP8_SINKS],
    "trtllm": [*FEWEST, *FEWEST_FP8, *SINKS, *SECTIONS],
    "sdpa": [*WHOLE, *UNEVEN, *FP8, *SINKS, *SECTIONS, *FP8_SINKS, *LATENTS, *FP8_LATENTS, *CAPPED],
    "fa,triton": FEWEST,
    "fa,fi": FEWEST,
    "invariant": [*FEWER, *UNEVEN, *FP8],
}
"""``invariant`` is the backend for the option ``batch_invariant``."""

CASES = [
    pytest.param(name, case, id=f"{name}-{case}")
    for name, cases in BACKENDS.items()
    for case in cases
]
every_backend = pytest.mark.parametrize(("name", "case"), CASES)


def make_backend(name: str, case: Case, dtype: torch.dtype, device: torch.device) -> PagedAttention:
    setting = case.setting(dtype, device)
    if name == "invariant":
        return choose_attention(None, replace(setting, batch_invariant=True))
    try:
        return choose_attention(name, setting)
    except ConfigError as error:
        pytest.skip(str(error))


def limit_of(name: str, case: Case) -> float:
    """XQA rounds queries and weights to float8 if keys and values are."""
    return 0.12 if name == "trtllm" and case.fp8 else 0.015


@every_backend
def test_ragged_chunks_and_extensions(
    name: str, case: Case, device: torch.device, dtype: torch.dtype
) -> None:
    backend = make_backend(name, case, dtype, device)
    prompts = Prompts.of(case.setting(dtype, device))
    assert_tokens_close(prompts.attend(backend), prompts.expected(), limit=0.015)


@every_backend
def test_chunks_of_captured_steps(
    name: str, case: Case, device: torch.device, dtype: torch.dtype
) -> None:
    """Decoding rows stand before the chunks, padding after them: neither may be overwritten."""
    backend = make_backend(name, case, dtype, device)
    if not backend.captures_chunks:
        return
    prompts = Prompts.of(case.setting(dtype, device))
    between = torch.randn_like(prompts.paged.empty_out(prompts.q[:13]))
    out = prompts.attend_as_captured(backend, between)
    assert torch.equal(out[:13], between)
    assert torch.equal(out[-13:], between)
    assert_tokens_close(out[13:-13], prompts.expected(), limit=0.015)


@every_backend
@pytest.mark.parametrize("num_rows", [5, 20])
def test_decode(
    name: str, case: Case, num_rows: int, device: torch.device, dtype: torch.dtype
) -> None:
    backend = make_backend(name, case, dtype, device)
    step = Decoding(case.setting(dtype, device), num_rows)
    inputs = step.inputs(seed=0)
    step.take(inputs)
    out = step.attend(backend, inputs.host_lengths)
    assert_tokens_close(out, step.expected(inputs), limit=limit_of(name, case))


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@every_backend
def test_replays_far_ahead_of_the_device(
    name: str, case: Case, device: torch.device, dtype: torch.dtype
) -> None:
    """Replays of a graph, each with other rows and lengths, are enqueued before the first runs."""
    backend = make_backend(name, case, dtype, device)
    assert backend.can_capture == (name != "sdpa")
    if not backend.can_capture:
        return
    step = Decoding(case.setting(dtype, device), 20)
    all_inputs = [step.inputs(seed) for seed in range(6)]

    def schedule(lengths: IntArray) -> None:
        if isinstance(backend.decode, ScheduledDecode):
            backend.decode.schedule_rows(lengths)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        schedule(np.ones(20, np.int32))
        step.attend(backend, None)  # compiles and allocates
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = step.attend(backend, None)
        torch.cuda._sleep(20_000_000)
        found = []
        for inputs in all_inputs:
            step.take(inputs)
            schedule(inputs.host_lengths)
            graph.replay()
            found.append(out.clone())
    stream.synchronize()
    for actual, inputs in zip(found, all_inputs, strict=True):
        assert_tokens_close(actual, step.expected(inputs), limit=limit_of(name, case))


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["cuda", "triton", "fa", "fi", "trtllm", "sdpa", "fa,fi", "fi,triton", "sdpa,fi"]
)
def test_engines_answer_alike(name: str, tmp_path: Path) -> None:
    """Greedy tokens of a checkpoint in bf16, from graphs if there are any, with and without prompts
    in between."""
    reference = write_broad_checkpoint(tmp_path).bfloat16().float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    try:
        sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, attention_backend=name)
    except ConfigError as error:
        pytest.skip(str(error))
    assert max(shortfalls(reference, prompts, tokens_of(sinks))) < 0.15


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [None, "triton", "sdpa", "sdpa,triton", "triton,sdpa"])
def test_engines_answer_alike_over_latents(name: str | None, tmp_path: Path) -> None:
    layers = ["dense"] * 3  # rounding may choose other experts
    reference = write_broad_latents_checkpoint(tmp_path, mlp_layer_types=layers).bfloat16().float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, attention_backend=name)
    assert max(shortfalls(reference, prompts, tokens_of(sinks))) < 0.15


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [None, "fa", "fa,triton"])
@pytest.mark.parametrize("most_captured", [0, None], ids=["expanded", "as they are"])
def test_latents_of_the_sizes_that_flash_attention_takes(
    name: str | None, most_captured: int | None, tmp_path: Path
) -> None:
    """Chunks whose step is not captured expand latents."""
    pytest.importorskip("sgl_kernel.flash_attn")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "v_head_dim": 256}
    latents = {"kv_lora_rank": 512, "qk_nope_head_dim": 192}
    layers = ["dense"] * 3
    reference = write_broad_latents_checkpoint(tmp_path, **heads, **latents, mlp_layer_types=layers)
    reference = reference.bfloat16().float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    options: dict[str, Any] = {"attention_backend": name, "cuda_graph_max_tokens": most_captured}
    options["max_prefill_tokens"] = 512
    sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, **options)
    assert max(shortfalls(reference, prompts, tokens_of(sinks))) < 0.15


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize("graphs", [None, 0], ids=["captured", "launched"])
@pytest.mark.parametrize("name", [None, "triton", "triton,fa", "sdpa"])
def test_engines_choose_positions(name: str | None, graphs: int | None, tmp_path: Path) -> None:
    """Exactly in float32; rounding to bfloat16 may choose other positions, of nearly the same
    score."""
    if name == "triton,fa":
        pytest.importorskip("sgl_kernel.flash_attn")
    reference = write_broad_indexer_checkpoint(tmp_path).float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    options: dict[str, Any] = {"attention_backend": name, "max_sequence_length": CONTEXT}
    if graphs is not None:
        options |= {"cuda_graph_max_batch_size": 0, "cuda_graph_max_tokens": 0}
    if name in (None, "sdpa"):
        sinks = serve(tmp_path, prompts, dtype="float32", **options)
        below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
        assert np.mean(below > 0) < 0.02 and below.max() < 0.05
    sinks = serve(tmp_path, prompts, **options)
    below = np.array(shortfalls(reference.bfloat16().float(), prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.3 and below.mean() < 0.1


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_engines_over_latents_in_float8(name: str, tmp_path: Path) -> None:
    layers = ["dense"] * 3
    reference = write_broad_latents_checkpoint(tmp_path, mlp_layer_types=layers).bfloat16().float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": name}
    sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, **options)
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.4
    assert below.max() < 1.0


@pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["cuda", "triton", "sdpa"])
def test_scales_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Scales of fp8 pages change how keys and values are rounded, and nothing else."""
    reference = write_broad_checkpoint(tmp_path).bfloat16().float()
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer, scales in enumerate([(1 / 16, 1 / 4), (1 / 8, 1 / 32)]):
        for of, scale in zip("kv", scales, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{of}_scale"] = torch.tensor(scale)
    save_file(tensors, path)
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    options: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "attention_backend": name}
    try:
        sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, **options)
    except ConfigError as error:
        pytest.skip(str(error))
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.4
    assert below.max() < 1.0


def test_graphs_are_refused_where_they_cannot_be(tmp_path: Path, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    write_broad_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="sdpa cannot be captured"):
        serve(tmp_path, [], attention_backend="sdpa", cuda_graph_max_batch_size=4)
