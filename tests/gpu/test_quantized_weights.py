"""Quantized checkpoints loaded to a GPU, compared with the same ones on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels import linear_cut
from minisgl_backend.kernels.adapters import (
    AdaptedTokens,
    arrange_tokens,
    arranged_size,
    block_tokens,
)
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.quantized import dequantized, quantize
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.quantized_matrix import QuantizedMatrix
from minisgl_backend.layers.router import Router
from minisgl_backend.models.adapter_slots import AdapterShape, AdapterSlots
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.kernel_choice import has_expert_kernels, use_tensor_cores
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.weight_format import Encoding, WeightFormat
from minisgl_bench.dummy_model import FORMATS, write_dummy_model
from minisgl_bench.logits import PAGE_SIZE, logits_of
from tests.conformance.quantized_checkpoints import CASES, write_quantized
from tests.gpu.compare import relative_error

NUM_SLOTS = 3
RANK = 16


def spec_of_two_layers(folder: Path) -> ModelSpec:
    """The spec of a checkpoint, cut to its first two layers."""
    spec = load_spec(folder)
    return replace(spec, num_layers=2, windows=spec.windows[:2])


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_a_cpu(case: str, device: torch.device, tmp_path: Path) -> None:
    """Bit for bit: dequantized to 16 bits, and kept quantized."""
    write_quantized(case, tmp_path)
    for keep_quantized in (False, True):
        here, there = (
            build_model(
                load_spec(tmp_path),
                tmp_path,
                dtype=torch.bfloat16,
                device=place,
                group=OneRank(),
                kernels=KernelChoices(fused=False, keep_quantized=keep_quantized),
            )
            for place in (torch.device("cpu"), device)
        )
        for name, expected in here.named_parameters():
            found = there.get_parameter(name)
            assert found.device.type == device.type
            assert found.dtype == expected.dtype
            assert torch.equal(
                found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
            ), name


@pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 64, 256, 300])
@pytest.mark.parametrize("have_adapters", [False, True])
def test_kept_weights_give_the_logits_of_dequantized_ones(
    weights: str, num_tokens: int, have_adapters: bool, device: torch.device, tmp_path: Path
) -> None:
    """By kernels for tensor cores, and in batches too large for those: then tokens of fp8 weights
    are rounded to 8 bits, too."""
    write_dummy_model("qwen3-0.6b", tmp_path, weights)
    logits = []
    adapted = None
    if have_adapters:
        block = block_tokens(num_tokens)
        content = arrange_tokens(
            np.arange(num_tokens, dtype=np.int32) % (NUM_SLOTS + 1),
            np.array([0] + [RANK] * NUM_SLOTS, np.int32),
            block=block,
            size=arranged_size(num_tokens, NUM_SLOTS, block),
        )
        adapted = AdaptedTokens(torch.from_numpy(content).to(device), num_tokens, block)
    for keep_quantized in (False, True):
        model = build_model(
            spec_of_two_layers(tmp_path),
            tmp_path,
            dtype=torch.bfloat16,
            device=device,
            group=OneRank(),
            load_format="dummy",
            max_sequence_length=512,
            kernels=KernelChoices(keep_quantized=keep_quantized),
        )
        shape = model.spec.attention_shape(1)
        storage = KVStorage(
            shape, num_pages=40, page_size=PAGE_SIZE, dtype=torch.bfloat16, device=device
        )
        model.bind_pages(storage.layers)
        if have_adapters:
            fill(AdapterSlots(model, NUM_SLOTS, RANK, device), device)
        use_tensor_cores(model, device)
        packed = [m for m in model.modules() if isinstance(m, QuantizedMatrix)]
        assert len(packed) == (8 if keep_quantized else 0)
        assert all(matrix.arrange() is not None for matrix in packed)
        with torch.inference_mode():
            logits.append(logits_of(model, torch.arange(num_tokens, device=device) * 7, adapted))
    # a number with a mantissa of 3 bits is off by 2.5 % (rms): eight GEMMs of such inputs add up
    rounds_tokens = "fp8" in weights and num_tokens > linear_cut.largest_batch(0, float8=True)
    tolerance = 0.12 if rounds_tokens else 0.03
    assert relative_error(logits[1], logits[0]) < tolerance


def fill(slots: AdapterSlots, device: torch.device) -> None:
    """Put random adapters for all projections into the slots."""
    shape = AdapterShape(RANK, (1 << len(slots.projections)) - 1)
    generator = torch.Generator(device).manual_seed(0)
    for slot in range(1, NUM_SLOTS + 1):
        flat = torch.randn(slots.num_elements(shape), generator=generator, device=device)
        slots.write(slot, shape, (flat * 0.05).to(torch.bfloat16))


@pytest.mark.skipif(is_interpreted(), reason="CUDA C++ needs a GPU")
@pytest.mark.parametrize(
    ("shape", "weights"),
    [
        ("qwen3-30b-a3b", "int4-awq"),
        ("qwen3-30b-a3b", "int4-gptq"),
        ("qwen3-30b-a3b", "fp8-channel"),
        ("gpt-oss-20b", None),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 30, 300])
def test_kept_experts_give_the_logits_of_dequantized_ones(
    shape: str, weights: str | None, num_tokens: int, device: torch.device, tmp_path: Path
) -> None:
    write_dummy_model(shape, tmp_path, weights)
    spec = spec_of_two_layers(tmp_path)
    logits = []

    def keeps(form: WeightFormat) -> bool:
        return has_expert_kernels(form, spec, 1)

    for kept in (False, True):
        model = build_model(
            spec,
            tmp_path,
            dtype=torch.bfloat16,
            device=device,
            group=OneRank(),
            load_format="dummy",
            max_sequence_length=512,
            kernels=KernelChoices(keep_quantized=False, keeps_experts=keeps if kept else None),
        )
        shape_of_pages = model.spec.attention_shape(1)
        storage = KVStorage(
            shape_of_pages, num_pages=40, page_size=PAGE_SIZE, dtype=torch.bfloat16, device=device
        )
        model.bind_pages(storage.layers)
        for module in model.modules():
            if isinstance(module, Router):  # otherwise choices count almost equally
                module.weight.data.mul_(4)
        use_tensor_cores(model, device)
        experts = [module for module in model.modules() if isinstance(module, ExpertsMLP)]
        assert all((module.weights.kinds is not None) == kept for module in experts)
        with torch.inference_mode():
            logits.append(logits_of(model, torch.arange(num_tokens, device=device) * 7))
        del model, experts
    # a token whose scores nearly tie takes another expert if its inputs are rounded differently
    apart = (logits[1] - logits[0]).float().norm(dim=-1) / logits[0].float().norm(dim=-1)
    rounds_tokens = weights == "fp8-channel" and num_tokens == 300  # 2.7 % of all: see above
    assert apart.median() < (0.05 if rounds_tokens else 0.03) and (apart > 0.1).float().mean() < 0.1


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("block", [(128, 128), (1, 32), (64, 96)])
def test_quantizing_is_that_of_a_cpu(
    encoding: Encoding, block: tuple[int, int], device: torch.device
) -> None:
    weight = torch.randn(320, 384, generator=torch.Generator().manual_seed(0))
    for symmetric in (True, False):
        if not symmetric and encoding not in (Encoding.INT4, Encoding.INT8):
            continue
        expected = quantize(weight, encoding, block, symmetric=symmetric)
        found = quantize(weight.to(device), encoding, block, symmetric=symmetric)
        # a scale may be rounded differently, as may a quotient at the edge between two codes
        apart = dequantized(found, torch.float32).cpu() - dequantized(expected, torch.float32)
        assert (apart.abs() > 1e-5).float().mean() < 1e-3
        assert apart.abs().max() < 0.6
