"""Weights in every layout: any share is a slice of what the whole stands for; errors name the
mistake.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.packed_weight import dequantize_weight, pack
from minisgl_backend.kernels.quantized import QuantizedWeight, dequantized, quantize
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.matrix import DenseMatrix, Matrix
from minisgl_backend.layers.quantized_matrix import QuantizedMatrix
from minisgl_backend.layers.quantized_place import QuantizedPlace, place_in
from minisgl_backend.layers.router import Router
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import ReadTensor, Share, collect_places
from minisgl_backend.layers.weight_share import WeightShare, block_of
from minisgl_backend.model_check import checked_spec
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.gated_delta_net import GatedDeltaNet
from minisgl_backend.models.indexer import Indexer
from minisgl_backend.models.kimi_delta import KimiDeltaAttention
from minisgl_backend.models.latent_attention import LatentAttention
from minisgl_backend.models.mamba import MambaMixer
from minisgl_backend.models.quantization import read_quantization
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.weight_format import (
    CONVERT_TO_FP8,
    CONVERTED_FP8,
    Encoding,
    Layout,
    Rule,
    WeightFormat,
    WeightFormats,
)
from tests.conformance.checkpoints import write_checkpoint
from tests.conformance.quantized_checkpoints import (
    CASES,
    Pack,
    auto_round,
    awq,
    fp8_blocks,
    fp8_blocks_of_modelopt,
    fp8_channel,
    fp8_tensor,
    gptq,
    int8,
    mx_packed,
    mxfp8,
    nvfp4,
    nvfp4_modelopt,
    packed,
    plain,
    write_quantized,
)
from tests.fakes.ranks import LoneRank

CPU: Final = torch.device("cpu")


def _form(
    layout: Layout, encoding: Encoding, block: tuple[int | None, int | None], **more: bool
) -> WeightFormat:
    return WeightFormat(layout=layout, encoding=encoding, block=block, **more)


LAYOUTS: Final[dict[str, tuple[WeightFormat, Pack]]] = {
    "fp8 blocks": (_form(Layout.FP8, Encoding.E4M3, (128, 128)), fp8_blocks),
    "fp8 small blocks": (
        _form(Layout.FP8, Encoding.E4M3, (48, 48)),
        lambda weight: fp8_blocks(weight, size=48),
    ),
    "fp8 channel": (_form(Layout.FP8, Encoding.E4M3, (1, None)), fp8_channel),
    "fp8 tensor": (_form(Layout.FP8, Encoding.E4M3, (None, None)), fp8_tensor),
    "converted": (CONVERTED_FP8, plain),
    "gptq": (
        _form(Layout.GPTQ, Encoding.INT4, (1, 64), symmetric=False),
        lambda weight: gptq(weight, group=64, symmetric=False),
    ),
    "gptq symmetric": (_form(Layout.GPTQ, Encoding.INT4, (1, 128)), gptq),
    "gptq reordered": (
        _form(Layout.GPTQ_V2, Encoding.INT4, (1, 32), symmetric=False, reorders=True),
        lambda weight: gptq(weight, group=32, symmetric=False, version=2, reorders=True),
    ),
    "gptq 8 bits": (
        _form(Layout.GPTQ, Encoding.INT8, (1, None), symmetric=False),
        lambda weight: gptq(weight, bits=8, group=-1, symmetric=False),
    ),
    "awq": (
        _form(Layout.AWQ, Encoding.INT4, (1, 32), symmetric=False),
        lambda weight: awq(weight, group=32),
    ),
    "packed": (
        _form(Layout.PACKED, Encoding.INT4, (1, 128), symmetric=False),
        lambda weight: packed(weight, symmetric=False),
    ),
    "packed reordered": (
        _form(Layout.PACKED, Encoding.INT4, (1, 64), reorders=True),
        lambda weight: packed(weight, group=64, reorders=True),
    ),
    "packed 8 bits": (
        _form(Layout.PACKED, Encoding.INT8, (1, 64), symmetric=False),
        lambda weight: packed(weight, bits=8, group=64, symmetric=False),
    ),
    "mxfp4": (_form(Layout.MX_PACKED, Encoding.E2M1, (1, 32)), mx_packed),
    "nvfp4": (_form(Layout.NV_PACKED, Encoding.E2M1, (1, 16)), nvfp4),
    "fp8 blocks of modelopt": (
        _form(Layout.FP8, Encoding.E4M3, (128, 128)),
        fp8_blocks_of_modelopt,
    ),
    "mxfp8": (_form(Layout.MXFP8, Encoding.E4M3, (1, 32)), mxfp8),
    "mxfp8 of others": (
        _form(Layout.MXFP8, Encoding.E4M3, (1, 32)),
        lambda weight: mxfp8(weight, name="weight_scale_inv"),
    ),
    "int8": (_form(Layout.INT8, Encoding.INT8, (1, None)), int8),
    "int8 tensor": (
        _form(Layout.INT8, Encoding.INT8, (None, None), static_inputs=True),
        lambda weight: int8(weight, per_tensor=True, static=True),
    ),
    "auto-round": (
        _form(Layout.GPTQ, Encoding.INT4, (1, 64), symmetric=False),
        lambda weight: auto_round(weight, group=64, symmetric=False),
    ),
    "nvfp4 of modelopt": (_form(Layout.NV_MODELOPT, Encoding.E2M1, (1, 16)), nvfp4_modelopt),
}


def _share(rng: np.random.Generator, total: int, *, step: int) -> Share:
    """A random part, sometimes the whole, whose edges are multiples of ``step``."""
    if rng.random() < 0.3:
        return Share(total, 0, total)
    begin = int(rng.integers(0, total // step)) * step
    return Share(total, begin, int(rng.integers(1, (total - begin) // step + 1)) * step)


def _read(form: WeightFormat, tensors: dict[str, Tensor], outs: Share, ins: Share) -> Tensor:
    """A share, loaded as the loader does."""
    got: list[QuantizedWeight] = []
    block = block_of(form, [(0, outs)], ins)
    place = QuantizedPlace(WeightShare(form, outs, ins, block), CPU, got.append)
    found = {}
    for part, stored in place.tensors("x.weight").items():
        name = next((name for name in stored.names if name in tensors), None)
        assert name is not None or stored.optional
        if name is not None:
            assert tuple(tensors[name].shape) in stored.shapes
            values = tensors[name][stored.region_of(tuple(tensors[name].shape))]
            found[part] = ReadTensor(f"x.{name}", values)
    place.fill(found)
    (weight,) = got
    assert weight.block == block
    lines = -(-outs.size // block[0])
    if weight.groups is None:
        assert weight.scales.shape == (lines, -(-ins.size // block[1]))
    return dequantized(weight, torch.float32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_share_is_a_slice_of_the_whole(name: str) -> None:
    """No number changes, even if the share's edges cut blocks, groups and words."""
    form, pack = LAYOUTS[name]
    rng = np.random.default_rng(list(LAYOUTS).index(name))
    for index in range(40):
        # zero points lie in words of eight outputs; the tools need whole words of inputs
        rows, columns = int(rng.integers(1, 40)) * 8, int(rng.integers(1, 9)) * 64
        generator = torch.Generator().manual_seed(index)
        tensors, numbers = pack(torch.randn(rows, columns, generator=generator))
        outs, ins = _share(rng, rows, step=1), _share(rng, columns, step=2)
        expected = numbers[outs.start : outs.end, ins.start : ins.end]
        assert torch.equal(_read(form, tensors, outs, ins), expected), (outs, ins)


@pytest.mark.parametrize("per_tensor", [False, True])
def test_kept_weights_in_int8_have_the_scales_of_the_checkpoint(per_tensor: bool) -> None:
    """In float32, though the model is in bfloat16: kernels take scales of whole rows so."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(128, 256, generator=generator)
    tensors, numbers = int8(weight, per_tensor=per_tensor, scale_type=torch.float32)
    scales = tensors["weight_scale"]
    assert not torch.equal(scales, scales.bfloat16().float())
    form = _form(Layout.INT8, Encoding.INT8, (None if per_tensor else 1, None))
    whole = Share(128, 0, 128), Share(256, 0, 256)
    stored = StoredWeight(
        form, block_of(form, [(0, whole[0])], whole[1]), weight.shape, num_inputs=256
    )
    stored.cast(torch.bfloat16)
    place = place_in(stored, slice(0, 128), form, *whole)
    place.fill({"codes": ReadTensor("", tensors["weight"]), "scales": ReadTensor("", scales)})
    assert torch.equal(dequantized(stored.weight, torch.float32), numbers)
    packed = pack(stored.weight)
    assert packed is not None and packed.row_scales is not None
    assert torch.equal(packed.row_scales, scales.flatten().expand(128))
    assert torch.equal(dequantize_weight(packed.weight, torch.float32, packed=True), numbers)


def test_kept_scales_of_groups_of_integers_have_the_type_of_the_model() -> None:
    form = _form(Layout.PACKED, Encoding.INT4, (1, 64))
    stored = StoredWeight(form, (1, 64), (128, 256), num_inputs=256)
    stored.cast(torch.bfloat16)
    assert stored.scales.dtype == torch.bfloat16


def test_a_cut_inside_a_byte_is_refused() -> None:
    form, pack = LAYOUTS["awq"]
    tensors, _ = pack(torch.randn(16, 64))
    with pytest.raises(ConfigError, match=r"x.weight: int4 .* split at input 33 or 64 of 64"):
        _read(form, tensors, Share(16, 0, 16), Share(64, 33, 31))


def test_zeros_of_version_1_carry_over_words() -> None:
    """A zero point of 0 borrows from its neighbour when 1 is subtracted from all in a word."""
    weight = torch.rand(8, 64) + 1.0
    weight[3] -= 3.0  # its zero points are the largest, all others are 0
    tensors, numbers = gptq(weight, group=32, symmetric=False)
    form = _form(Layout.GPTQ, Encoding.INT4, (1, 32), symmetric=False)
    assert torch.equal(_read(form, tensors, Share(8, 0, 8), Share(64, 0, 64)), numbers)


@pytest.mark.parametrize("encoding", Encoding)
@pytest.mark.parametrize("block", [(1, 32), (16, 48), (128, 128), (1, 200)])
def test_quantizing_is_as_near_as_the_numbers_allow(
    encoding: Encoding, block: tuple[int, int]
) -> None:
    """Within half a step of the encoding, and exact for numbers that it can represent."""
    weight = torch.randn(70, 200, generator=torch.Generator().manual_seed(1))
    weight[:, 50] = 0
    for symmetric in (True, False):
        if not symmetric and encoding not in (Encoding.INT4, Encoding.INT8):
            continue
        found = quantize(weight, encoding, block, symmetric=symmetric)
        numbers = dequantized(found, torch.float32)
        scales = found.scales.float()
        if encoding is Encoding.E2M1:
            scales = torch.exp2(scales - 127)
        step = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:70, :200]
        if encoding is Encoding.E4M3:  # 3 bits after the leading one
            step = torch.maximum(step * 2.0**-9, weight.abs() * 2.0**-3)
        if encoding is Encoding.E2M1:  # 1 bit; beyond 6 the largest number
            step = torch.maximum(step, weight.abs() * 0.5)
        assert ((numbers - weight).abs() <= 0.502 * step).all()
        again = quantize(numbers, encoding, block, symmetric=symmetric)
        torch.testing.assert_close(dequantized(again, torch.float32), numbers)


def test_scales_of_nothing() -> None:
    """A block of zeros has a valid scale."""
    for encoding in Encoding:
        found = quantize(torch.zeros(4, 64), encoding, (1, 32))
        assert not dequantized(found, torch.float32).any()
        assert found.scales.float().isfinite().all()


def test_a_large_weight_is_dequantized_in_parts() -> None:
    """Rows are processed a million numbers at a time, cut at the edges of blocks."""
    weight = torch.randn(300, 2**17, dtype=torch.bfloat16)
    found = quantize(weight, Encoding.E4M3, (48, 128))
    numbers = dequantized(found, torch.float32)
    lines = torch.arange(300) // 48
    expected = found.codes.float() * found.scales[lines].repeat_interleave(128, dim=1)
    assert torch.equal(numbers, expected)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case, written once."""
    root, written = tmp_path_factory.mktemp("quantized"), set()

    def folder(case: str) -> Path:
        if case not in written:
            write_quantized(case, root / case)
            written.add(case)
        return root / case

    return folder


def _build(folder: Path, group: Group | None = None, **options: Any) -> Decoder:
    return build_model(
        load_spec(folder),
        folder,
        dtype=torch.float32,
        device=CPU,
        group=group or OneRank(),
        **options,
    )


Q_PROJ: Final = "model.layers.1.self_attn.q_proj"
Spoil = Callable[[dict[str, Tensor]], None]


def _set(name: str, value: float, at: tuple[int, ...] = ()) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.{name}"][at] = value

    return spoil


def _replace(name: str, change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q_PROJ}.{name}"] = change(tensors[f"{Q_PROJ}.{name}"]).contiguous()

    return spoil


def _drop(name: str) -> Spoil:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{Q_PROJ}.{name}"]

    return spoil


SPOILT: Final[dict[str, tuple[str, Spoil, str]]] = {
    "no scale": (
        "fp8-blocks",
        _drop("weight_scale_inv"),
        r"lacks .*q_proj\.weight_scale_inv$",
    ),
    "scale 0": (
        "fp8-blocks",
        _set("weight_scale_inv", 0, (0, 1)),
        r"q_proj\.weight_scale_inv must be finite and above 0, it is 0.0 at \[0, 1\]",
    ),
    "negative scale": (
        "ct-fp8-blocks",
        _set("weight_scale", -1.5, (0, 1)),
        r"q_proj\.weight_scale must be finite and above 0, it is -1.5 at \[0, 1\]",
    ),
    "negative input scale": (
        "autofp8-static",
        _set("input_scale", -0.5, (0,)),
        r"q_proj\.input_scale must be finite and above 0, it is -0.5",
    ),
    "scale nan": (
        "autofp8-static",
        _set("weight_scale", math.nan),
        r"weight_scale must .* is nan$",
    ),
    "scale inf": (
        "ct-fp8-blocks",
        _set("weight_scale", math.inf, (0, 0)),
        "weight_scale must .*inf",
    ),
    "scale too large for float32": (
        "fp8-blocks",
        _replace("weight_scale_inv", lambda scale: scale.double() * 1e300),
        r"weight_scale_inv must be finite and above 0, it is inf at \[0, 0\]",
    ),
    "scale too small for float32": (
        "awq-128",
        _replace("scales", lambda scale: scale.double() * 1e-300),
        r"scales must be finite and not 0, it is 0.0 at \[0, 0\]",
    ),
    "blocks of another size": (
        "fp8-blocks",
        _replace("weight_scale_inv", lambda scale: scale[:, :1]),
        r"q_proj\.weight_scale_inv has the shape \(1, 1\), the model needs \(1, 2\)",
    ),
    "input scale 0": (
        "autofp8-static",
        _set("input_scale", 0.0, (0,)),
        "input_scale must be finite",
    ),
    "no input scale": ("modelopt-fp8", _drop("input_scale"), r"lacks .*q_proj\.input_scale"),
    "codes of another type": (
        "fp8-blocks",
        _replace("weight", lambda codes: codes.to(torch.float8_e5m2)),
        r"q_proj\.weight has the type F8_E5M2, the model needs F8_E4M3",
    ),
    "codes of another type and shape": (
        "fp8-blocks",
        _replace("weight", lambda codes: codes.view(torch.uint8)[:, ::2]),
        r"q_proj\.weight has the type U8, the model needs F8_E4M3",
    ),
    "codes of another shape": (
        "gptq-128",
        _replace("qweight", lambda words: words[:-1]),
        r"q_proj\.qweight has the shape \(23, 128\), the model needs \(24, 128\)",
    ),
    "no zeros": ("gptq-128", _drop("qzeros"), r"lacks .*q_proj\.qzeros"),
    "not symmetric": (
        "gptq-128",
        _set("qzeros", 0, (0, 0)),
        r"q_proj\.qzeros has zero points other",
    ),
    "groups in another order": (
        "gptq-128",
        _replace("g_idx", lambda groups: groups.flip(0)),
        r"q_proj\.g_idx reorders the inputs",
    ),
    "unknown group": ("gptq-reordered", _set("g_idx", 7, (5,)), r"g_idx has groups .* the 3 there"),
    "awq scale": (
        "awq-128",
        _set("scales", math.nan, (1, 4)),
        r"q_proj\.scales must .* at \[1, 4\]",
    ),
    "no scales": ("awq-128", _drop("scales"), r"lacks .*q_proj\.scales"),
    "packed shape": (
        "ct-w4a16-group",
        _set("weight_shape", 96, (0,)),
        r"weight_shape is \[96, 192\]",
    ),
    "packed scale": (
        "ct-w4a16-group",
        _set("weight_scale", 0, (3, 0)),
        r"weight_scale must be finite",
    ),
    "nvfp4 scale negative": (
        "ct-nvfp4",
        _set("weight_scale", -0.5, (3, 2)),
        r"q_proj\.weight_scale must be finite and without a sign, it is -0.5 at \[3, 2\]",
    ),
    "nvfp4 scale -0": (
        "ct-nvfp4",
        _set("weight_scale", -0.0, (3, 2)),
        r"q_proj\.weight_scale must be .* without a sign, it is -0.0 at \[3, 2\]",
    ),
    "nvfp4 scale nan": (
        "modelopt-nvfp4-tied",
        _set("weight_scale", math.nan, (0, 1)),
        r"q_proj\.weight_scale must be finite .* it is nan at \[0, 1\]",
    ),
    "nvfp4 scale of all 0": (
        "modelopt-nvfp4-tied",
        _set("weight_scale_2", 0),
        r"q_proj\.weight_scale_2 must be finite and above 0, it is 0.0$",
    ),
    "nvfp4 scale of all negative": (
        "ct-nvfp4",
        _set("weight_global_scale", -2.0),
        r"q_proj\.weight_global_scale must be finite and above 0, it is -2.0",
    ),
    "nvfp4 scale of all nan": (
        "ct-nvfp4",
        _set("weight_global_scale", math.nan),
        r"q_proj\.weight_global_scale must be finite and above 0, it is nan",
    ),
    "nvfp4 divisor too small": (
        "ct-nvfp4",
        _set("weight_global_scale", 1e-39),
        r"q_proj\.weight_global_scale is too small to divide by",
    ),
    "nvfp4 input scale of another type": (
        "ct-nvfp4",
        _replace("input_global_scale", lambda scale: scale.int()),
        r"q_proj\.input_global_scale has the type I32, the model needs F64 or F32 or F16 or BF16",
    ),
    "nvfp4 input scale of another shape": (
        "modelopt-nvfp4-tied",
        _replace("input_scale", lambda scale: scale.repeat(3)),
        r"q_proj\.input_scale has the shape \(3,\), the model needs \(\) or \(1,\)",
    ),
    "nvfp4 no scale of all": (
        "ct-nvfp4",
        _drop("weight_global_scale"),
        r"lacks .*q_proj\.weight_global_scale$",
    ),
    "nvfp4 of modelopt, no scale of all": (
        "modelopt-nvfp4-tied",
        _drop("weight_scale_2"),
        r"lacks .*q_proj\.weight_scale_2$",
    ),
    "nvfp4 groups of another size": (
        "modelopt-nvfp4-tied",
        _replace("weight_scale", lambda scale: scale[:, ::2]),
        r"q_proj\.weight_scale has the shape \(128, 6\), the model needs \(128, 12\)",
    ),
    "nvfp4 scales of another type": (
        "ct-nvfp4",
        _replace("weight_scale", lambda scale: scale.view(torch.uint8)),
        r"q_proj\.weight_scale has the type U8, the model needs F8_E4M3",
    ),
    "nvfp4 scale of all of another shape": (
        "ct-nvfp4",
        _replace("weight_global_scale", lambda scale: scale.repeat(128)),
        r"q_proj\.weight_global_scale has the shape \(128,\), the model needs \(\) or \(1,\)",
    ),
    "nvfp4 with smoothed inputs": (
        "modelopt-nvfp4-tied",
        lambda tensors: tensors.update({f"{Q_PROJ}.pre_quant_scale": torch.ones(192)}),
        r"no place for .*q_proj\.pre_quant_scale of the checkpoint",
    ),
    "no order": ("ct-w4a16-actorder", _drop("weight_g_idx"), r"lacks .*q_proj\.weight_g_idx"),
    "int8 scale 0": (
        "ct-int8",
        _set("weight_scale", 0, (7, 0)),
        r"q_proj\.weight_scale must be finite and not 0, it is 0.0 at \[7, 0\]",
    ),
    "int8 codes without a sign": (
        "ct-int8",
        _replace("weight", lambda codes: codes.view(torch.uint8)),
        r"q_proj\.weight has the type U8, the model needs I8",
    ),
    "int8 zero points": (
        "ct-int8",
        lambda tensors: tensors.update({f"{Q_PROJ}.weight_zero_point": torch.ones(128, 1)}),
        r"no place for .*q_proj\.weight_zero_point of the checkpoint",
    ),
    "mxfp8 exponent that is no number": (
        "ct-mxfp8",
        _set("weight_scale", 255, (3, 2)),
        r"q_proj\.weight_scale is no exponent \(255\) at \[3, 2\]$",
    ),
    "mxfp8 scales of another type": (
        "ct-mxfp8",
        _replace("weight_scale", lambda scale: scale.float()),
        r"q_proj\.weight_scale has the type F32, the model needs U8 or F8_E8M0",
    ),
    "blocks of modelopt of another size": (
        "modelopt-fp8-blocks",
        _replace("weight_scale", lambda scale: scale[:, :, :1]),
        r"weight_scale has the shape \(1, 1, 1, 1\), .* needs \(1, 2\) or \(1, 1, 2, 1\)",
    ),
    "no zeros of symmetric awq": (
        "awq-by-auto-round",
        _drop("qzeros"),
        r"lacks .*q_proj\.qzeros",
    ),
    "no zeros of auto-round": ("auto-round-awq", _drop("qzeros"), r"lacks .*q_proj\.qzeros"),
}


def _spoilt(checkpoints: Callable[[str], Path], case: str, folder: Path) -> dict[str, Tensor]:
    """Copy a checkpoint's files except the weights, which are returned."""
    for path in checkpoints(case).glob("*.json"):
        (folder / path.name).write_text(path.read_text())
    return load_file(checkpoints(case) / "model.safetensors")


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_wrong_is_named(
    name: str, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    case, spoil, message = SPOILT[name]
    tensors = _spoilt(checkpoints, case, tmp_path)
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        _build(tmp_path)


def test_an_exponent_that_is_no_number_is_named(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = _spoilt(checkpoints, "mxfp4-stacked-moe", tmp_path)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    message = r"down_proj_scales is no exponent \(255\) at \[2, 5, 1\]$"
    with pytest.raises(ConfigError, match=message):
        _build(tmp_path)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize(
    ("case", "name"), [("ct-nvfp4", "input_global_scale"), ("modelopt-nvfp4-tied", "input_scale")]
)
def test_scales_of_activations_in_nvfp4_may_be_anything(
    case: str, name: str, value: float, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Nothing uses them, and published checkpoints have some that are not finite."""
    tensors = _spoilt(checkpoints, case, tmp_path)
    tensors[f"{Q_PROJ}.{name}"].fill_(value)
    save_file(tensors, tmp_path / "model.safetensors")
    found, expected = (dict(_build(at).named_parameters()) for at in (tmp_path, checkpoints(case)))
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


def test_sizes_are_compared_with_those_of_codes_in_bytes(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """A byte of ModelOpt's ``weight`` has two inputs."""
    tensors = _spoilt(checkpoints, "modelopt-nvfp4-tied", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:, :90].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    options = EngineOptions(model=str(tmp_path))
    message = r"hidden_size is 192, but .*q_proj.* \(128, 180\), with two inputs in a byte$"
    with pytest.raises(ConfigError, match=message):
        checked_spec(options, tmp_path, "cpu")


def test_other_bytes_have_one_number_each(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = _spoilt(checkpoints, "fp8-blocks", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:, :96].contiguous().view(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    options = EngineOptions(model=str(tmp_path))
    with pytest.raises(ConfigError, match=r"hidden_size is 192, but .*q_proj.* \(128, 96\)$"):
        checked_spec(options, tmp_path, "cpu")


def test_codes_are_never_read_as_plain_numbers(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Even if config.json does not say that the weights are quantized."""
    tensors = _spoilt(checkpoints, "fp8-blocks", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    kept = {name: values for name, values in tensors.items() if "scale_inv" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"_proj\.weight has the type F8_E4M3"):
        _build(tmp_path)


def test_modules_that_the_tool_left_plain_are_plain(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    """Even if config.json does not list them: a plain weight is unmistakable."""
    tensors = _spoilt(checkpoints, "awq-128", tmp_path)
    number = torch.randn(128, 192)
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{Q_PROJ}.{part}"]
    tensors[f"{Q_PROJ}.weight"] = number
    save_file(tensors, tmp_path / "model.safetensors")
    qkv = _build(tmp_path, kernels=KernelChoices(keep_quantized=True)).get_parameter(
        "model.layers.1.self_attn.qkv_proj.matrix.weight"
    )
    assert torch.equal(qkv[:128], number)
    assert qkv[128:].abs().max() > 0


@pytest.mark.parametrize("case", ["fp8-blocks", "awq-128", "gptq-reordered"])
def test_weights_of_sizes_that_kernels_do_not_take_are_dequantized(
    case: str, checkpoints: Callable[[str], Path]
) -> None:
    """Those that they take are kept."""
    folder = checkpoints(case)
    sizes: set[tuple[int, int]] = set()

    def takes(form: WeightFormat, out_features: int, in_features: int) -> bool:
        sizes.add((out_features, in_features))
        return in_features == load_spec(folder).intermediate_size

    model = _build(folder, kernels=KernelChoices(keep_quantized=True, takes=takes))
    plain = _build(folder)
    assert len({width for _, width in sizes}) > 1
    for name, matrix in model.named_modules():
        if not isinstance(matrix, Matrix):
            continue
        if name.endswith("down_proj.matrix"):
            assert isinstance(matrix, QuantizedMatrix)
            continue
        assert isinstance(matrix, DenseMatrix)
        assert torch.equal(matrix.weight, plain.get_parameter(f"{name}.weight"))


@pytest.mark.parametrize(
    "case",
    [
        *("fp8-blocks", "awq-64-moe", "gptq-reordered", "mxfp4-stacked-moe"),
        *("ct-nvfp4", "ct-nvfp4-moe", "modelopt-nvfp4-tied", "ct-int8", "modelopt-mxfp8-moe"),
    ],
)
def test_dummy_weights_of_ranks_are_slices_of_one_model(
    case: str, checkpoints: Callable[[str], Path]
) -> None:
    """Kept weights have the same slices as dequantized ones."""

    def down(group: Group, keep: bool) -> Tensor:
        kernels = KernelChoices(keep_quantized=keep)
        model = _build(checkpoints(case), group, load_format="dummy", seed=3, kernels=kernels)
        name = "model.layers.1.mlp." + ("memory.down" if "moe" in case else "down_proj.matrix")
        if not keep:
            return model.get_parameter(name if "moe" in case else f"{name}.weight").data
        storage = model.get_submodule(name if "moe" in case else f"{name}.storage")
        assert isinstance(storage, StoredWeight)
        return dequantized(storage.weight, torch.float32)

    whole = down(OneRank(), False)
    assert whole.std() > 0.015
    for keep in (False, True):
        parts = [down(LoneRank(rank, 2), keep) for rank in range(2)]
        assert torch.equal(torch.cat(parts, dim=-1), whole)


QWEN: Final = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
_PACK: Final = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_NVFP4: Final = {**_PACK, "format": "nvfp4-pack-quantized"}
_MXFP8: Final = {**_PACK, "format": "mxfp8-quantized"}
_MXFP4: Final = {**_PACK, "format": "mxfp4-pack-quantized"}
_INTEGERS: Final = {**_PACK, "format": "int-quantized"}
_AUTO_ROUND: Final = {"quant_method": "auto_round", "bits": 4, "group_size": 128, "sym": True}


def _group_of(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}


REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    **{
        method: ({"quant_method": method}, f"by {method} are not supported; supported are fp8 ")
        for method in ("bitsandbytes", "gguf", "exl2", "exl3", "torchao", "hqq", "quanto", "aqlm")
    },
    "bitsandbytes by its keys": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "by bitsandbytes are not supported",
    ),
    "no method": ({"bits": 4}, "by no quant_method are not supported"),
    "fp8 of another kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "weight_block_size must be",
    ),
    "fp8 scheme": ({"quant_method": "fp8", "activation_scheme": "no"}, "activation_scheme must be"),
    "awq bits": ({"quant_method": "awq", "bits": 3}, "bits 3 is not supported, only 4"),
    "awq gemv": ({"quant_method": "awq", "version": "gemv"}, "version 'gemv' is not supported"),
    "awq format": (
        {"quant_method": "awq", "checkpoint_format": "gemv_fast"},
        "checkpoint_format 'gemv_fast' is not supported, only 'gemm'",
    ),
    "fp4 experts": (
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        "expert_dtype 'fp4' is not supported, only 'fp8'",
    ),
    "routed experts": (
        {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"},
        "routed_experts_quant_method 'mxfp4' is not supported, only 'fp8'",
    ),
    "awq group": ({"quant_method": "awq", "group_size": 20}, "group_size must be -1 or a multiple"),
    "gptq bits": ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported, only 4 and 8"),
    "gptq marlin": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not supported, only 'gptq' and 'gptq_v2'",
    ),
    "gptq rules": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 3}}},
        r"dynamic: \+:\.\*down\.\*: bits 3 is not supported, only 4 and 8",
    ),
    "gptq words": (
        {"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"},
        "pack_dtype 'int16' is not supported, only 'int32'",
    ),
    "gptq format": (
        {"quant_method": "gptq", "bits": 4, "format": "bitblas"},
        "checkpoint_format 'bitblas' is not supported",
    ),
    "gptq rotated": (
        {"quant_method": "gptq", "bits": 4, "rotation": "hadamard"},
        "rotation 'hadamard' is not supported",
    ),
    "gptq adapter": (
        {"quant_method": "gptq", "bits": 4, "adapter": {"name": "lora", "rank": 32}},
        "adapter .*'lora'.* is not supported",
    ),
    "gptq expression": (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"-:(": {}}},
        r"dynamic: '-:\(' is no regular expression: missing \), unterminated subpattern$",
    ),
    "modules of awq that are no expression": (
        {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["lm_head", "gate["]},
        r"'gate\[' is no regular expression: unterminated character set$",
    ),
    **{
        f"modelopt {algorithm}": (
            {"quant_method": "modelopt", "quant_algo": algorithm},
            f"quant_algo {algorithm} is not supported; supported are FP8, FP8_PER_CHANNEL_PER_TOKEN"
            ", FP8_PB_WO, MXFP8, NVFP4, W4A16_NVFP4, and MIXED_PRECISION of these",
        )
        for algorithm in (
            *("NVFP4_AWQ", "NVFP4_SVD", "W4A8_NVFP4_FP8", "W4A8_MXFP4_FP8"),
            *("W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL"),
        )
    },
    **{
        f"modelopt {algorithm} groups": (
            {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16},
            f"group_size 16 is not supported, only {wanted}",
        )
        for algorithm, wanted in (("fp8_pb_wo", 128), ("MXFP8", 32))
    },
    "modelopt groups": (
        {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "group_size": 32},
        "group_size 32 is not supported, only 16",
    ),
    "modelopt pages": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo 'NVFP4' is not supported, only 'FP8'",
    ),
    "modelopt mixed without modules": (
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        "quantized_layers: MIXED_PRECISION needs the modules that are quantized",
    ),
    "modelopt mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                "model.layers.0.mlp.down_proj": {"quant_algo": "W4A8_AWQ", "group_size": 128},
            },
        },
        r"quantized_layers: model\.layers\.0\.mlp\.down_proj: quant_algo W4A8_AWQ is not supported",
    ),
    "nvfp4 groups": (
        {**_NVFP4, **_group_of(num_bits=4, type="float", group_size=32)},
        "weights: group_size 32 is not supported, only 16",
    ),
    "nvfp4 integers": (
        {**_NVFP4, **_group_of(num_bits=4, type="int", group_size=16)},
        "weights: type 'int' is not supported, only 'float'",
    ),
    "nvfp4 bits": (
        {**_NVFP4, **_group_of(num_bits=8, type="float", group_size=16)},
        "weights: num_bits 8 is not supported, only 4",
    ),
    "nvfp4 strategy": (
        {**_NVFP4, **_group_of(num_bits=4, type="float", strategy="channel")},
        "strategy must be tensor_group or group",
    ),
    "nvfp4 zero points": (
        {**_NVFP4, **_group_of(num_bits=4, type="float", group_size=16, symmetric=False)},
        "symmetric False is not supported, only True",
    ),
    "nvfp4 scales": (
        {**_NVFP4, **_group_of(num_bits=4, type="float", group_size=16, scale_dtype="torch.uint8")},
        "scale_dtype 'uint8' is not supported, only 'float8_e4m3fn'",
    ),
    "w8a8 of 4 bits": (
        {**_INTEGERS, **_group_of(num_bits=4, type="int")},
        r"int-quantized weights of 4 bits \(int\) are not supported",
    ),
    "w8a8 floats": (
        {**_INTEGERS, **_group_of(num_bits=8, type="float")},
        r"int-quantized weights of 8 bits \(float\) are not supported",
    ),
    "w8a8 zero points": (
        {**_INTEGERS, **_group_of(num_bits=8, type="int", symmetric=False)},
        "weights: symmetric False is not supported, only True",
    ),
    "w8a8 groups": (
        {**_INTEGERS, **_group_of(num_bits=8, type="int", group_size=128)},
        "weights: strategy must be tensor or channel, got 'group'",
    ),
    "mxfp8 groups": (
        {**_MXFP8, **_group_of(num_bits=8, type="float", group_size=16)},
        "weights: group_size 16 is not supported, only 32",
    ),
    "mxfp8 integers": (
        {**_MXFP8, **_group_of(num_bits=8, type="int", group_size=32)},
        "weights: type 'int' is not supported, only 'float'",
    ),
    "mxfp8 bits": (
        {**_MXFP8, **_group_of(num_bits=4, type="float", group_size=32)},
        "weights: num_bits 4 is not supported, only 8",
    ),
    "mxfp8 strategy": (
        {**_MXFP8, **_group_of(num_bits=8, type="float", strategy="channel")},
        "weights: strategy must be group, got 'channel'",
    ),
    "mxfp8 zero points": (
        {**_MXFP8, **_group_of(num_bits=8, type="float", group_size=32, symmetric=False)},
        "weights: symmetric False is not supported, only True",
    ),
    "mxfp4 integers": (
        {**_MXFP4, **_group_of(num_bits=4, type="int", group_size=32)},
        "weights: type 'int' is not supported, only 'float'",
    ),
    "mxfp4 strategy": (
        {**_MXFP4, **_group_of(num_bits=4, type="float", group_size=32, strategy="tensor_group")},
        "weights: strategy must be group, got 'tensor_group'",
    ),
    "mxfp4 zero points": (
        {**_MXFP4, **_group_of(num_bits=4, type="float", group_size=32, symmetric=False)},
        "weights: symmetric False is not supported, only True",
    ),
    **{
        f"auto-round {packing}": (
            {**_AUTO_ROUND, "packing_format": packing},
            f"packing_format '{packing}' is not supported, only 'auto_round:auto_gptq' and "
            "'auto_round:auto_awq'",
        )
        for packing in (
            *("auto_round", "auto_round:exllamav2", "auto_round:gptqmodel", "auto_round:fp8"),
            *("auto_round:llm_compressor", "mlx"),
        )
    },
    "auto-round kernel of old files": (
        {**_AUTO_ROUND, "backend": "auto_round:triton"},
        "packing_format 'auto_round:triton' is not supported",
    ),
    "auto-round bits": ({**_AUTO_ROUND, "bits": 2}, "bits 2 is not supported, only 4 and 8"),
    "auto-round bits of AWQ": (
        {**_AUTO_ROUND, "bits": 8, "packing_format": "auto_round:auto_awq"},
        "bits 8 is not supported, only 4",
    ),
    "auto-round bits of a module": (
        {**_AUTO_ROUND, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 3}}},
        r"extra_config: model\.layers\.0\.mlp\.up_proj: bits 3 is not supported, only 4 and 8",
    ),
    "auto-round floats": (
        {**_AUTO_ROUND, "data_type": "mx_fp"},
        "data_type 'mx_fp' is not supported, only 'int'",
    ),
    "auto-round activations": (
        {**_AUTO_ROUND, "act_bits": 8},
        "act_bits 8 is not supported, only 16",
    ),
    "auto-round rotated": (
        {**_AUTO_ROUND, "spinquant_config": {"r1": True}},
        "spinquant_config .* is not supported",
    ),
    "auto-round expression": (
        {**_AUTO_ROUND, "extra_config": {"(": {"bits": 16}}},
        r"extra_config: '\(' is no regular expression: missing \), unterminated subpattern$",
    ),
    "auto-round blocks": (
        {**_AUTO_ROUND, "block_name_to_quantize": [["model.layers"], 1]},
        "block_name_to_quantize must be a list of names",
    ),
    "packed of 3 bits": ({**_PACK, **_group_of(num_bits=3, type="int")}, "of 3 bits"),
    "packed order": (
        {
            **_PACK,
            **_group_of(num_bits=4, type="int", strategy="group", group_size=64, actorder="up"),
        },
        "actorder must be group",
    ),
    "packed activations": (
        {
            **_PACK,
            "config_groups": {
                "g": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int"},
                    "input_activations": {"num_bits": 8, "type": "int"},
                }
            },
        },
        r"config_groups\.g\.input_activations is not supported with pack-quantized weights$",
    ),
    "packed expression": (
        {
            **_PACK,
            "config_groups": {
                "g": {"targets": ["re:up(_proj"], "weights": {"num_bits": 4, "type": "int"}}
            },
        },
        r"'re:up\(_proj' is no regular expression: missing \), unterminated subpattern$",
    ),
    "packed strategy": (
        {**_PACK, **_group_of(num_bits=4, type="int", strategy="token")},
        "strategy must be group, channel",
    ),
    "sparse": ({**_PACK, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    "rotated": ({**_PACK, "transform_config": {"config_groups": {"u": {}}}}, "rotated weights"),
    "names": ({**_PACK, "ignore": "lm_head"}, "ignore must be a list of names"),
}


def test_a_target_that_says_more_counts_before_one_that_says_less() -> None:
    """Whatever the order of the groups, as in compressed-tensors."""
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    given = {
        **_PACK,
        "config_groups": {
            "all": {"targets": ["Linear"], "weights": four},
            "down": {"targets": ["re:.*down_proj"], "weights": {**four, "num_bits": 8}},
            "first": {"targets": ["model.layers.0.mlp.down_proj"], "weights": four},
            "head": {"targets": ["re:.*lm_head"], "weights": None},
        },
    }
    formats = read_quantization(ConfigReader({"quantization_config": given}), None)
    assert formats is not None
    found = [formats.of(f"model.layers.{at}.mlp.down_proj") for at in (0, 1)]
    found.append(formats.of("model.layers.1.mlp.up_proj"))
    assert [form and form.encoding.bits for form in found] == [4, 8, 4]
    assert formats.of("lm_head") is None


def test_of_expressions_the_first_by_its_text_counts() -> None:
    """Whatever the order of the groups, as in compressed-tensors."""
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    groups = {
        "some": {"targets": ["re:.*up_proj"], "weights": four},
        "most": {"targets": ["re:.*proj"], "weights": {**four, "num_bits": 8}},
    }
    for names in (["some", "most"], ["most", "some"]):
        given = {**_PACK, "config_groups": {name: groups[name] for name in names}}
        formats = read_quantization(ConfigReader({"quantization_config": given}), None)
        assert formats is not None
        form = formats.of("model.layers.0.mlp.up_proj")
        assert form is not None and form.encoding is Encoding.INT8


@pytest.mark.parametrize(
    ("excluded", "plain_names", "quantized_names"),
    [
        ("*lm_head", ["lm_head", "model.lm_head"], ["model.layers.0.mlp.up_proj"]),
        ("*.gate", ["model.layers.0.mlp.gate"], ["model.layers.0.mlp.gate_proj"]),
        ("model.layers.*.self_attn*", ["model.layers.3.self_attn.q_proj"], ["lm_head"]),
        ("model.layers.1", ["model.layers.1.mlp.up_proj"], ["model.layers.11.mlp.up_proj"]),
        ("up_proj", ["model.layers.1.mlp.up_proj"], ["model.layers.1.mlp.down_proj"]),
        ("layers.[01]", ["model.layers.0.mlp.up_proj"], ["model.layers.2.mlp.up_proj"]),
        ("(layers.[0", [], ["model.layers.0.mlp.up_proj"]),
    ],
)
def test_modelopt_excludes_by_wildcards(
    excluded: str, plain_names: list[str], quantized_names: list[str]
) -> None:
    given = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [excluded]}
    formats = read_quantization(ConfigReader({"quantization_config": given}), None)
    assert formats is not None
    assert [name for name in plain_names if formats.of(name) is not None] == []
    assert [name for name in quantized_names if formats.of(name) is None] == []


def test_a_text_config_may_say_how_it_is_stored() -> None:
    """In a vision model, its text_config may have the format; the outer config takes precedence."""
    scheme = {"quant_method": "awq", "bits": 4, "group_size": 32}
    text = {**QWEN, "model_type": "mistral", "quantization_config": scheme}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    assert str(parse_spec(whole).weights) == "int4 in groups of 32 (zero points) (awq)"
    of_whole = {**whole, "quantization_config": {"quant_method": "fp8"}}
    assert str(parse_spec(of_whole).weights) == "fp8 per tensor (fp8)"
    text["quantization_config"] = {"quant_method": "hqq"}
    with pytest.raises(ConfigError, match=r"text_config: quantization_config: .* by hqq are not"):
        parse_spec(whole)


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_are_refused(name: str) -> None:
    quantization, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        parse_spec({**QWEN, "quantization_config": quantization})


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_weights_of_mlx_are_refused_by_name(key: str) -> None:
    """Its older versions have a key of their own; then only the embedding's odd shape showed it."""
    message = f"^config.json: {key}: weights quantized by mlx are not supported"
    with pytest.raises(ConfigError, match=message):
        parse_spec({**QWEN, key: {"group_size": 64, "bits": 4}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "int4 per tensor"),
        ({"group_size": -1}, "int4 per channel"),
        ({"group_size": 64}, "int4 in groups of 64"),
        ({"group_size": 64, "actorder": "weight"}, "int4 in groups of 64"),
        ({"group_size": 64, "actorder": True, "symmetric": False}, "int4 in groups of 64 (zero po"),
    ],
)
def test_defaults_of_a_scheme(given: dict[str, Any], said: str) -> None:
    quantization = {**_PACK, **_group_of(num_bits=4, type="int", **given)}
    spec = parse_spec({**QWEN, "quantization_config": quantization})
    assert str(spec.weights).startswith(said)
    assert (spec.weights is not None) and spec.weights.of("model.layers.0.mlp.up_proj") is not None


def test_what_the_log_says() -> None:
    said = {
        case: str(parse_spec({**QWEN, "quantization_config": what.config}, what.modelopt).weights)
        for case, what in CASES.items()
    }
    assert said["fp8-blocks"] == "fp8 in blocks of 128 x 128 (fp8)"
    assert said["gptq-reordered"] == "int4 in groups of 64 (reordered) (gptq)"
    assert said["awq-channel"] == "int4 per channel (zero points) (awq)"
    assert said["modelopt-fp8"] == "fp8 per tensor (modelopt)"
    assert said["ct-nvfp4"] == "fp4 in groups of 16 (compressed-tensors)"
    assert said["modelopt-mixed-mamba"] == "fp8 per tensor, fp4 in groups of 16 (modelopt)"
    assert said["mxfp4-stacked-moe"] == "fp4 in groups of 32 (mxfp4)"
    assert said["ct-int8"] == "int8 per channel (compressed-tensors)"
    assert said["ct-mxfp8"] == "fp8 in groups of 32 (compressed-tensors)"
    assert said["auto-round-by-name"] == "int8 in groups of 32, int4 in groups of 128 (auto-round)"


def test_the_log_says_what_is_computed(
    checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        _build(checkpoints("fp8-blocks"))
    said = (
        "weights: fp8 in blocks of 128 x 128 (fp8), dequantized while loading to float32, take 0."
    )
    assert said in caplog.text


def test_only_plain_weights_are_converted(checkpoints: Callable[[str], Path]) -> None:
    folder = checkpoints("awq-128")
    options = EngineOptions(model=str(folder), quantization="fp8")
    with pytest.raises(ConfigError, match=r"=fp8 is for plain .* int4 in .* are served so"):
        checked_spec(options, folder, "cpu")
    spec = checked_spec(options, folder / "numbers", "cpu")
    assert str(spec.weights) == "fp8 in blocks of 128 x 128 (converted while loading)"
    kept = build_model(
        spec,
        folder / "numbers",
        dtype=torch.float32,
        device=CPU,
        group=OneRank(),
        kernels=KernelChoices(keep_quantized=True),
    )
    codes = {name for name, value in kept.named_parameters() if value.dtype == torch.float8_e4m3fn}
    assert len(codes) == 2 * 4
    assert not any("lm_head" in name or "embed" in name for name in codes)
    assert set(collect_places(kept)) == set(load_file(folder / "numbers" / "model.safetensors"))


def test_weights_of_sizes_that_kernels_do_not_take_are_not_converted(
    checkpoints: Callable[[str], Path],
) -> None:
    folder = checkpoints("awq-128") / "numbers"

    def loaded(weights: WeightFormats | None) -> dict[str, Tensor]:
        model = build_model(
            replace(load_spec(folder), weights=weights),
            folder,
            dtype=torch.float32,
            device=CPU,
            group=OneRank(),
            kernels=KernelChoices(
                keep_quantized=True, takes=lambda form, out_features, in_features: False
            ),
        )
        return dict(model.named_parameters())

    plain, converted = loaded(None), loaded(CONVERT_TO_FP8)
    assert all(torch.equal(plain[name], weight) for name, weight in converted.items())


@pytest.mark.parametrize(
    "case",
    [
        *("qwen3-moe", "llama4", "gemma4-experts", "granite-moe", "granite-hybrid", "hy-v3"),
        *("minimax-m2", "nemotron-h-experts"),
    ],
)
def test_routers_are_not_converted(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)

    def routers(spec: ModelSpec) -> list[Tensor]:
        model = build_model(spec, tmp_path, dtype=torch.float32, device=CPU, group=OneRank())
        return [module.weight for module in model.modules() if isinstance(module, Router)]

    stored, converted = routers(spec), routers(replace(spec, weights=CONVERT_TO_FP8))
    assert stored and all(map(torch.equal, stored, converted))


def test_random_weights_of_index_queries_are_plain(tmp_path: Path) -> None:
    """As those of checkpoints, which no rule of their config.json names."""
    write_checkpoint("glm-moe-dsa", tmp_path)
    form = WeightFormat(layout=Layout.FP8, encoding=Encoding.E4M3, block=(128, 128))
    weights = WeightFormats("test", (Rule(re.compile(".*"), form),))
    model = build_model(
        replace(load_spec(tmp_path), weights=weights),
        tmp_path,
        dtype=torch.bfloat16,
        device=CPU,
        group=OneRank(),
        load_format="dummy",
        kernels=KernelChoices(keep_quantized=True),
    )
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    assert indexers
    for indexer in indexers:
        assert isinstance(indexer.weights_proj.matrix, DenseMatrix)
        assert isinstance(indexer.wk.matrix, QuantizedMatrix)


@pytest.mark.parametrize("case", ["nemotron-h", "granite-hybrid", "falcon-h1"])
def test_all_inputs_of_mamba_are_converted(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    model = build_model(
        replace(load_spec(tmp_path), weights=CONVERT_TO_FP8),
        tmp_path,
        dtype=torch.float32,
        device=CPU,
        group=OneRank(),
        kernels=KernelChoices(keep_quantized=True),
    )
    mixers = [module for module in model.modules() if isinstance(module, MambaMixer)]
    assert mixers and all(isinstance(mixer.in_proj.matrix, QuantizedMatrix) for mixer in mixers)


@pytest.mark.parametrize(
    "case", ["qwen2-moe", "qwen3.5", "qwen3-next", "kimi-linear", "bailing-hybrid"]
)
def test_what_stays_plain_anyway_is_not_converted(case: str, tmp_path: Path) -> None:
    """Gates of shared experts, rates of Gated DeltaNet, what Kimi Delta Attention has besides wide
    projections, and gates of latent attention."""
    write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)

    def small_weights(weights: WeightFormats | None) -> list[Tensor]:
        model = build_model(
            replace(spec, weights=weights),
            tmp_path,
            dtype=torch.float32,
            device=CPU,
            group=OneRank(),
            kernels=KernelChoices(keep_quantized=True),
        )
        found: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, GatedDeltaNet):
                linear = module.in_proj if module.rates_proj is None else module.rates_proj
                assert isinstance(linear.matrix, DenseMatrix)
                found.append(linear.matrix.weight[-2 * module.local.num_heads :])
            elif isinstance(module, KimiDeltaAttention):
                shape = module.local
                rates = module.in_proj if module.rates_proj is None else module.rates_proj
                small = [(rates, shape.num_heads)]
                if module.f_b_proj is not None and module.g_b_proj is not None:
                    small = [
                        (rates, shape.num_heads + 2 * shape.key_dim),
                        (module.f_b_proj, shape.key_size),
                        (module.g_b_proj, shape.value_size),
                    ]
                for linear, rows in small:
                    assert isinstance(linear.matrix, DenseMatrix)
                    found.append(linear.matrix.weight[-rows:])
            elif isinstance(module, LatentAttention) and spec.attention_gates is not None:
                linear = module.a_proj if module.g_proj is None else module.g_proj
                assert isinstance(linear.matrix, DenseMatrix)
                found.append(linear.matrix.weight[-module.num_heads :])
            elif isinstance(module, ExpertsMLP) and module.shared_gate is not None:
                found.append(module.shared_gate)
        return found

    stored, converted = small_weights(None), small_weights(CONVERT_TO_FP8)
    assert stored and all(map(torch.equal, stored, converted))
