"""Quantized checkpoints loaded to a GPU, beside the same ones on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels import linear_cut
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.quantized import dequantized, quantize
from minisgl_backend.layers.quantized_matrix import QuantizedMatrix
from minisgl_backend.models.build import build_model, use_tensor_cores
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.weight_format import Encoding
from minisgl_bench.dummy_model import FORMATS, write_dummy_model
from minisgl_bench.fp8_pages import PAGE_SIZE, logits_of
from tests.conformance.quantized_checkpoints import CASES, write_quantized
from tests.gpu.compare import relative_error


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_a_cpu(case: str, device: torch.device, tmp_path: Path) -> None:
    """Bit by bit: dequantized to 16 bits, and kept."""
    write_quantized(case, tmp_path)
    for keep_quantized in (False, True):
        here, there = (
            build_model(
                load_spec(tmp_path),
                tmp_path,
                dtype=torch.bfloat16,
                device=place,
                group=OneRank(),
                fused=False,
                keep_quantized=keep_quantized,
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
def test_kept_weights_give_the_logits_of_dequantized_ones(
    weights: str, num_tokens: int, device: torch.device, tmp_path: Path
) -> None:
    """On tensor cores, and beyond them: then tokens of fp8 weights are rounded to 8 bits, too."""
    write_dummy_model("qwen3-0.6b", tmp_path, weights)
    logits = []
    for keep_quantized in (False, True):
        model = build_model(
            replace(load_spec(tmp_path), num_layers=2),
            tmp_path,
            dtype=torch.bfloat16,
            device=device,
            group=OneRank(),
            load_format="dummy",
            max_sequence_length=512,
            keep_quantized=keep_quantized,
        )
        shape = model.spec.attention_shape(1)
        storage = KVStorage(
            shape, num_pages=40, page_size=PAGE_SIZE, dtype=torch.bfloat16, device=device
        )
        model.bind_pages(storage.layers)
        use_tensor_cores(model, device)
        packed = [m for m in model.modules() if isinstance(m, QuantizedMatrix)]
        assert len(packed) == (8 if keep_quantized else 0)
        assert all(matrix.arrange() is not None for matrix in packed)
        with torch.inference_mode():
            logits.append(logits_of(model, torch.arange(num_tokens, device=device) * 7))
    # a number with a mantissa of 3 bits is off by 2.5 % (rms): eight GEMMs of such inputs add up
    tolerance = 0.12 if "fp8" in weights and num_tokens > linear_cut.MAX_TOKENS else 0.03
    assert relative_error(logits[1], logits[0]) < tolerance


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
        # a scale may be rounded otherwise, and a quotient at the edge between two codes
        apart = dequantized(found, torch.float32).cpu() - dequantized(expected, torch.float32)
        assert (apart.abs() > 1e-5).float().mean() < 1e-3
        assert apart.abs().max() < 0.6
