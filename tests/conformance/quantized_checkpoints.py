"""Tiny quantized checkpoints in every format, and what their weights stand for.

Each format is a few lines of plain PyTorch, written from the format's description without the
engine's code: they round a weight, pack it as the tool that writes the format does, and say which
numbers the result stands for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.conformance.checkpoints import write_model

Packed = tuple[dict[str, Tensor], Tensor]
"""A weight's tensors by the last part of their names, and the numbers that they stand for."""
Pack = Callable[[Tensor], Packed]
FP8_MAX: Final = 448.0
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp8_blocks(weight: Tensor, *, name: str = "weight_scale_inv", size: int = 128) -> Packed:
    rows, columns = weight.shape
    lines, width = -(-rows // size), -(-columns // size)
    scale = torch.zeros(lines, width)
    codes, numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(lines):
        for j in range(width):
            block = (slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size))
            scale[i, j] = weight[block].abs().max() / FP8_MAX
            codes[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            numbers[block] = codes[block].float() * scale[i, j]
    return {"weight": codes, name: scale}, numbers


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / FP8_MAX
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.02])}
    return tensors, codes.float() * scale


def fp8_channel(weight: Tensor) -> Packed:
    scale = (weight.abs().amax(dim=1, keepdim=True) / FP8_MAX).bfloat16()  # [rows, 1]
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_blocks_of_modelopt(weight: Tensor) -> Packed:
    """With a dimension of 1 after each of the scales."""
    tensors, numbers = fp8_blocks(weight, name="weight_scale")
    return {**tensors, "weight_scale": tensors["weight_scale"][:, None, :, None]}, numbers


def mxfp8(weight: Tensor, *, name: str = "weight_scale") -> Packed:
    """With a group of zeros, whose exponent is the least."""
    weight = weight.clone()
    weight[0, :32] = 0
    groups = weight.view(len(weight), -1, 32)  # [rows, groups, 32]
    exponents = (groups.abs().amax(dim=-1).log2().floor() - 8).clamp_min(-127)  # [rows, groups]
    scales = exponents.double().exp2().float()[..., None]
    codes = (groups / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scales).flatten(1)
    return {"weight": codes.flatten(1), name: (exponents + 127).to(torch.uint8)}, numbers


def int8(
    weight: Tensor,
    *,
    per_tensor: bool = False,
    static: bool = False,
    scale_type: torch.dtype = torch.bfloat16,
) -> Packed:
    """Per channel unless ``per_tensor``; ``static``: with scale and zero point of activations."""
    largest = weight.abs().max() if per_tensor else weight.abs().amax(dim=1, keepdim=True)
    scale = (largest / 127.5).to(scale_type)
    codes = (weight / scale.float()).round().clamp(-128, 127)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": scale}
    if static:
        tensors["input_scale"] = torch.tensor([0.03])
        tensors["input_zero_point"] = torch.tensor([-5], dtype=torch.int8)
    return tensors, codes * scale.float()


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along the last dimension, 32 / bits of them in an int32, the first in the lowest
    bits; missing ones are 0."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[-1] % per_word))
    split = padded.view(*padded.shape[:-1], -1, per_word)
    if order is not None:
        split = split[..., list(order)]
    word = (split << (torch.arange(per_word) * bits)).sum(dim=-1)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


@dataclass(frozen=True)
class Rounded:
    """Codes [rows, columns] from 0 on, scales and zero points [rows, groups], the group of each
    column, and the numbers that they stand for."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    @property
    def numbers(self) -> Tensor:
        return (self.codes - self.zeros[:, self.group_of]) * self.scales[:, self.group_of]


def rounded(
    weight: Tensor,
    bits: int,
    group: int,
    *,
    symmetric: bool,
    scale_type: torch.dtype,
    reorders: bool = False,
) -> Rounded:
    """Groups of neighbouring columns; if it ``reorders``, of neighbours in a random order."""
    most, columns = 2**bits - 1, weight.shape[1]
    width = group if group > 0 else columns
    order = torch.arange(columns)
    if reorders:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    codes, scales, zeros = [], [], []
    for part in torch.split(weight[:, order], width, dim=1):
        low, high = part.amin(dim=1).clamp_max(0), part.amax(dim=1).clamp_min(0)
        scale = part.abs().amax(dim=1) / (most // 2) if symmetric else (high - low) / most
        scale = scale.to(scale_type).float()
        zero = torch.full_like(scale, (most + 1) // 2) if symmetric else (-low / scale).round()
        codes.append((part / scale[:, None]).round().add(zero[:, None]).clamp(0, most))
        scales.append(scale)
        zeros.append(zero)
    back = order.argsort()
    return Rounded(
        torch.cat(codes, dim=1)[:, back],
        torch.stack(scales, dim=1),
        torch.stack(zeros, dim=1),
        (torch.arange(columns) // width)[back],
    )


def gptq(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    version: int = 1,
    reorders: bool = False,
) -> Packed:
    found = rounded(
        weight, bits, group, symmetric=symmetric, scale_type=torch.float16, reorders=reorders
    )
    stored = words(found.zeros.t(), bits)
    if version == 1:  # the subtraction goes through the whole word
        ones = sum(1 << shift for shift in range(0, 32, bits))
        less = (stored.long() - ones) % 2**32
        stored = torch.where(less >= 2**31, less - 2**32, less).to(torch.int32)
    tensors = {
        "qweight": words(found.codes, bits).t().contiguous(),
        "qzeros": stored,
        "scales": found.scales.t().half().contiguous(),
        "g_idx": found.group_of.int(),
        "bias": torch.zeros(len(weight)),  # these tools write one for every projection
    }
    return tensors, found.numbers


def awq(weight: Tensor, *, group: int = 128, symmetric: bool = False) -> Packed:
    found = rounded(weight, 4, group, symmetric=symmetric, scale_type=torch.float16)
    tensors = {
        "qweight": words(found.codes.t(), 4, AWQ_ORDER),
        "qzeros": words(found.zeros.t(), 4, AWQ_ORDER),
        "scales": found.scales.t().half().contiguous(),
    }
    return tensors, found.numbers


def packed(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    reorders: bool = False,
) -> Packed:
    found = rounded(
        weight, bits, group, symmetric=symmetric, scale_type=torch.bfloat16, reorders=reorders
    )
    tensors = {
        "weight_packed": words(found.codes, bits),
        "weight_scale": found.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(found.zeros.t(), bits).t().contiguous()
    if reorders:
        tensors["weight_g_idx"] = found.group_of.int()
    return tensors, found.numbers


def mx_packed(weight: Tensor) -> Packed:
    groups = weight.view(len(weight), -1, 32)  # [rows, groups, 32]
    exponents = groups.abs().amax(dim=-1).log2().floor() - 2  # [rows, groups]
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(dim=-1)
    numbers = (E2M1[codes] * exponents.exp2()[..., None]).flatten(1)
    codes = codes.flatten(1).to(torch.uint8)
    tensors = {
        "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        "weight_scale": (exponents + 127).to(torch.uint8),
    }
    return tensors, numbers


def nvfp4(weight: Tensor, *, modelopt: bool = False, inputs: bool = True) -> Packed:
    """With a group of zeros; with scales of activations if ``inputs``."""
    weight = weight.clone()
    weight[0, :16] = 0
    groups = weight.view(len(weight), -1, 16)  # [rows, groups, 16]
    whole = weight.abs().max() / (FP8_MAX * 6)
    if not modelopt:  # the other tool stores the reciprocal
        whole = 1 / (1 / whole)
    scales = (groups.abs().amax(dim=-1) / 6 / whole).to(torch.float8_e4m3fn)  # [rows, groups]
    scaled = groups / (scales.float().clamp_min(2**-9) * whole)[..., None]
    codes = (scaled[..., None] - E2M1).abs().argmin(dim=-1)
    numbers = (E2M1[codes] * scales.float()[..., None] * whole).flatten(1)
    codes = codes.flatten(1).to(torch.uint8)
    halves = codes[:, ::2] | codes[:, 1::2] << 4
    if modelopt:
        tensors = {"weight": halves, "weight_scale": scales, "weight_scale_2": whole}
        return {**tensors, **({"input_scale": torch.tensor(0.004)} if inputs else {})}, numbers
    tensors = {
        "weight_packed": halves,
        "weight_scale": scales,
        "weight_global_scale": (1 / whole)[None],
    }
    return {**tensors, **({"input_global_scale": torch.tensor([300.0])} if inputs else {})}, numbers


def auto_round(weight: Tensor, **options: Any) -> Packed:
    """As GPTQ, but without what AutoRound leaves out."""
    tensors, numbers = gptq(weight, **options)
    return {name: tensors[name] for name in ("qweight", "qzeros", "scales")}, numbers


def nvfp4_modelopt(weight: Tensor) -> Packed:
    return nvfp4(weight, modelopt=True)


def plain(weight: Tensor) -> Packed:
    return {"weight": weight}, fp8_blocks(weight)[1]


def _group(strategy: str, bits: int = 8, kind: str = "float", **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, **more}


def _by_names(*groups: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """Several groups of modules, by patterns of the checkpoint's names."""
    return {
        **_compressed("mixed-precision", {}),
        "config_groups": {
            f"group_{index}": {"targets": [f"re:{pattern}"], "format": form, "weights": weights}
            for index, (pattern, form, weights) in enumerate(groups)
        },
    }


def _compressed(form: str, weights: dict[str, Any], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }


def _is_narrow(weight: Tensor) -> bool:
    """Whether a weight of ``quantized-dense`` is k_proj, v_proj or down_proj."""
    return len(weight) == 64 or weight.shape[1] == 320


@dataclass(frozen=True)
class Case:
    """A format: how its weights are packed, and its ``quantization_config``, which is None if
    ModelOpt's own file has it.

    Projections whose names contain a match of ``plain_in`` stay plain; the output head does unless
    the case ``has_head``. Those whose names contain a match of the expression in ``others`` are
    packed in the way beside it. If ``stacked``, one tensor has all experts: with gates ``above``
    ups, as in newer versions of transformers, or ``interleaved``, as in gpt-oss.
    """

    pack: Pack
    config: Mapping[str, Any] | None
    modelopt: Mapping[str, Any] | None = None
    model: str = "quantized-dense"
    plain_in: str | None = None
    has_head: bool = False
    stacked: Literal["above", "interleaved"] | None = None
    others: tuple[str, Pack] | None = None


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_NVFP4 = _group("tensor_group", 4, group_size=16)
_NVFP4_INPUTS = {**_NVFP4, "dynamic": "local"}
_MODELOPT_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_MXFP8 = _group("group", 8, group_size=32, scale_dtype="torch.uint8")
_INT8 = _group("channel", 8, "int")
_INT8_INPUTS = _group("token", 8, "int", dynamic=True)
_AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "autoround_version": "0.12.3",
}
_OF_8_BITS = {"bits": 8, "group_size": 32}
_LEFT_PLAIN = {"bits": 16, "data_type": "float"}
_FP8_LAYER = {"quant_algo": "FP8"}
_NVFP4_LAYER = {"quant_algo": "NVFP4", "group_size": 16}
_FP8_IN_MAMBA = ("0.mixer.in", "0.mixer.out", "2.mixer.q", "2.mixer.k", "2.mixer.v")
_NVFP4_IN_MAMBA = (
    *("1.mixer", "3.mixer.shared_experts"),
    *(f"3.mixer.experts.{expert}" for expert in range(4)),
)
_PLAIN_IN_HYBRIDS = ["lm_head", "model.language_model.layers.0.linear_attn.in_proj_a"]
"""Named as in the whole model, as in publishers' checkpoints, which do not list all of them either.
"""
CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "fp8-blocks": Case(fp8_blocks, {**_FP8, "modules_to_not_convert": ["lm_head"]}),
        "fp8-blocks-moe": Case(
            fp8_blocks,
            {**_FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
            model="quantized-moe",
        ),
        "fp8-blocks-hybrid": Case(
            lambda weight: fp8_blocks(weight, size=64),
            {**_FP8, "weight_block_size": [64, 64], "modules_to_not_convert": _PLAIN_IN_HYBRIDS},
            model="quantized-hybrid",
        ),
        "fp8-blocks-hybrid-moe": Case(
            lambda weight: fp8_blocks(weight, size=64),
            {**_FP8, "weight_block_size": [64, 64], "modules_to_not_convert": _PLAIN_IN_HYBRIDS},
            model="quantized-hybrid-moe",
        ),
        "fp8-blocks-latents": Case(
            fp8_blocks,
            {**_FP8, "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate"]},
            model="quantized-latents",
        ),
        "fp8-blocks-indexer": Case(
            fp8_blocks,
            {
                **_FP8,
                "modules_to_not_convert": [
                    *("lm_head", "model.layers.1.mlp.gate"),
                    *(f"model.layers.{layer}.self_attn.indexer.weights_proj" for layer in range(2)),
                ],
            },
            model="quantized-indexer",
            plain_in=r"indexer\.weights_proj",
        ),
        "awq-latents": Case(
            lambda weight: awq(weight, group=64),
            {**_AWQ, "group_size": 64, "modules_to_not_convert": ["gate"]},
            model="quantized-latents",
        ),
        "autofp8-static": Case(
            fp8_tensor,
            {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        ),
        "ct-fp8-tensor-static": Case(
            fp8_tensor,
            _compressed("float-quantized", _group("tensor"), _group("tensor", dynamic=False)),
        ),
        "fp8-blocks-stacked-moe": Case(
            fp8_blocks,
            {**_FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
            model="quantized-moe",
            stacked="above",
        ),
        "ct-fp8-channel-moe": Case(
            fp8_channel,
            _compressed("float-quantized", _group("channel"), _group("token", dynamic=True)),
            model="quantized-moe",
        ),
        "ct-fp8-channel-llama4": Case(
            fp8_channel,
            {
                **_compressed("float-quantized", _group("channel"), _group("token", dynamic=True)),
                "ignore": ["lm_head", "re:.*self_attn", "re:.*router"],
            },
            model="quantized-llama4",
            plain_in="self_attn",
        ),
        "ct-fp8-blocks": Case(
            lambda weight: fp8_blocks(weight, name="weight_scale"),
            _compressed("float-quantized", _group("block", block_structure=[128, 128])),
        ),
        "modelopt-fp8": Case(
            fp8_tensor,
            None,
            modelopt={
                "producer": {"name": "modelopt"},
                "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
            },
        ),
        "awq-128": Case(awq, _AWQ),
        "awq-64-moe": Case(
            lambda weight: awq(weight, group=64),
            {**_AWQ, "group_size": 64, "modules_to_not_convert": ["gate"]},
            model="quantized-moe",
        ),
        "awq-merged": Case(awq, _AWQ, model="quantized-phi"),
        "gptq-merged": Case(gptq, _GPTQ, model="quantized-phi"),
        "gptq-merged-reordered": Case(
            lambda weight: gptq(weight, group=64, reorders=True),
            {**_GPTQ, "group_size": 64, "desc_act": True},
            model="quantized-phi",
        ),
        "ct-w4a16-merged": Case(
            lambda weight: packed(weight, symmetric=False),
            _compressed(
                "pack-quantized", {**_group("group", 4, "int", group_size=128), "symmetric": False}
            ),
            model="quantized-phi",
        ),
        "awq-by-auto-round": Case(
            lambda weight: awq(weight, symmetric=True), {**_AWQ, "zero_point": False, "sym": True}
        ),
        "awq-channel": Case(lambda weight: awq(weight, group=-1), {**_AWQ, "group_size": -1}),
        "gptq-128": Case(gptq, _GPTQ),
        "gptq-32-asymmetric": Case(
            lambda weight: gptq(weight, group=32, symmetric=False),
            {**_GPTQ, "group_size": 32, "sym": False},
        ),
        "gptq-v2-64-asymmetric": Case(
            lambda weight: gptq(weight, group=64, symmetric=False, version=2),
            {**_GPTQ, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        ),
        "gptq-reordered": Case(
            lambda weight: gptq(weight, group=64, reorders=True),
            {**_GPTQ, "group_size": 64, "desc_act": True},
        ),
        "gptq-channel": Case(lambda weight: gptq(weight, group=-1), {**_GPTQ, "group_size": -1}),
        "gptq-8-bits-moe": Case(
            lambda weight: gptq(weight, bits=8, group=32),
            {**_GPTQ, "bits": 8, "group_size": 32, "dynamic": {r"-:.*mlp\.gate$": {}}},
            model="quantized-moe",
        ),
        "gptq-by-name": Case(
            lambda weight: gptq(weight, bits=8, group=32) if _is_narrow(weight) else gptq(weight),
            {
                **_GPTQ,
                "dynamic": {
                    r"-:.*\.mlp\.gate$": {},
                    r".*\.[kv]_proj": {"bits": 8, "group_size": 32},
                    r"+:model\.layers\.\d+\.mlp\.down": {"bits": 8, "group_size": 32},
                },
            },
        ),
        "gptq-head": Case(gptq, {**_GPTQ, "lm_head": True}, has_head=True),
        "ct-w4a16-group": Case(
            packed, _compressed("pack-quantized", _group("group", 4, "int", group_size=128))
        ),
        "ct-w4a16-asymmetric-moe": Case(
            lambda weight: packed(weight, group=32, symmetric=False),
            _compressed(
                "pack-quantized", {**_group("group", 4, "int", group_size=32), "symmetric": False}
            ),
            model="quantized-moe",
        ),
        "ct-w4a16-actorder": Case(
            lambda weight: packed(weight, group=64, reorders=True),
            _compressed(
                "pack-quantized", _group("group", 4, "int", group_size=64, actorder="group")
            ),
        ),
        "ct-merged-by-name": Case(
            fp8_channel,
            _by_names(
                (r".*\.(qkv|gate_up)_proj$", "float-quantized", _group("channel")),
                (r"model\..*", "pack-quantized", _group("group", 4, "int", group_size=128)),
            ),
            model="quantized-phi",
            plain_in="(o|down)_proj",
        ),
        "ct-hybrid-by-name": Case(
            fp8_channel,
            _by_names((r".*\.(in_proj_(qkv|z)|\w+_proj)$", "float-quantized", _group("channel"))),
            model="quantized-hybrid",
        ),
        "fp8-blocks-mamba": Case(
            fp8_blocks,
            {**_FP8, "modules_to_not_convert": ["lm_head", "backbone.layers.3.mixer.gate"]},
            model="quantized-mamba",
        ),
        "autofp8-static-mamba": Case(
            fp8_tensor,
            {
                "quant_method": "fp8",
                "activation_scheme": "static",
                "ignored_layers": ["lm_head", "backbone.layers.3.mixer.gate"],
            },
            model="quantized-mamba",
        ),
        "ct-mamba": Case(
            fp8_channel,
            {
                **_compressed("float-quantized", _group("channel"), _group("token", dynamic=True)),
                "ignore": ["lm_head", "re:.*mixer.gate$"],
            },
            model="quantized-mamba",
        ),
        "ct-kimi": Case(
            fp8_channel,
            {
                **_compressed("float-quantized", _group("channel"), _group("token", dynamic=True)),
                "ignore": ["lm_head", r"re:.*self_attn\.(b|[fg]_[ab])_proj$"],
            },
            model="quantized-kimi",
            plain_in=r"self_attn\.(b|[fg]_[ab])_proj",
        ),
        "fp8-blocks-kimi": Case(
            lambda weight: fp8_blocks(weight, size=64),
            {**_FP8, "weight_block_size": [64, 64], "modules_to_not_convert": ["lm_head"]},
            model="quantized-kimi",
        ),
        "ct-bailing": Case(
            fp8_channel,
            {
                **_compressed("float-quantized", _group("channel"), _group("token", dynamic=True)),
                "ignore": [
                    "lm_head",
                    r"re:.*attention\.b_proj$",
                    "model.layers.1.attention.g_proj",
                ],
            },
            model="quantized-bailing",
            plain_in=r"attention\.b_proj|layers\.1\.attention\.g_proj",
        ),
        "fp8-blocks-bailing": Case(
            lambda weight: fp8_blocks(weight, size=64),
            {**_FP8, "weight_block_size": [64, 64], "modules_to_not_convert": ["lm_head"]},
            model="quantized-bailing",
        ),
        "ct-multipliers": Case(
            fp8_channel,
            _compressed("float-quantized", _group("channel"), _group("token", dynamic=True)),
            model="quantized-falcon",
        ),
        "gptq-multipliers": Case(
            lambda weight: gptq(weight, group=64, symmetric=False),
            {**_GPTQ, "group_size": 64, "sym": False},
            model="quantized-falcon",
        ),
        "ct-w8a16-channel": Case(
            lambda weight: packed(weight, bits=8, group=-1),
            _compressed("pack-quantized", _group("channel", 8, "int")),
        ),
        "ct-mxfp4-moe": Case(
            mx_packed,
            {
                **_compressed("mxfp4-pack-quantized", _group("group", 4, group_size=32)),
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
            },
            model="quantized-moe",
            plain_in="self_attn",
        ),
        "mxfp4-stacked-moe": Case(
            mx_packed,
            {
                "quant_method": "mxfp4",
                "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
            },
            model="quantized-moe",
            plain_in=r"self_attn|layers\.0\.mlp",
            stacked="interleaved",
        ),
        "ct-nvfp4": Case(nvfp4, _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUTS)),
        "ct-nvfp4-moe": Case(
            lambda weight: nvfp4(weight, inputs=False),
            _compressed("nvfp4-pack-quantized", _NVFP4),
            model="quantized-moe-cut-anywhere",
        ),
        "ct-nvfp4-merged": Case(
            nvfp4,
            _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUTS),
            model="quantized-phi",
        ),
        "ct-nvfp4-multipliers": Case(
            nvfp4,
            _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4_INPUTS),
            model="quantized-falcon",
        ),
        "ct-nvfp4-and-fp8-moe": Case(
            nvfp4,
            {
                **_by_names(
                    (r".*\.self_attn\..*", "float-quantized", _group("channel")),
                    (r".*\.mlp\..*_proj$", "nvfp4-pack-quantized", _NVFP4),
                ),
                "ignore": ["lm_head", "re:.*mlp.gate$"],
            },
            model="quantized-moe",
            others=("self_attn", fp8_channel),
        ),
        "modelopt-nvfp4-tied": Case(
            nvfp4_modelopt,
            None,
            modelopt={
                "producer": {"name": "modelopt", "version": "0.33.0"},
                "quantization": {
                    "quant_algo": "NVFP4",
                    "kv_cache_quant_algo": None,
                    "group_size": 16,
                    "exclude_modules": ["lm_head"],
                },
            },
            model="quantized-tied",
        ),
        "modelopt-nvfp4-head": Case(
            lambda weight: nvfp4(weight, modelopt=True, inputs=False),
            {
                "quant_method": "modelopt",
                "quant_algo": "W4A16_NVFP4",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": _MODELOPT_GROUP}},
                "ignore": [],
            },
            has_head=True,
        ),
        "modelopt-nvfp4-latents": Case(
            nvfp4_modelopt,
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["lm_head", "model.layers.1.mlp.gate"],
            },
            model="quantized-latents",
        ),
        "modelopt-mixed-mamba": Case(
            nvfp4_modelopt,
            None,
            modelopt={
                "quantization": {
                    "quant_algo": "MIXED_PRECISION",
                    "kv_cache_quant_algo": "FP8",
                    "exclude_modules": ["lm_head", "backbone.layers.2.mixer.o_proj"],
                    "quantized_layers": {
                        **{f"backbone.layers.{name}_proj": _FP8_LAYER for name in _FP8_IN_MAMBA},
                        **{
                            f"backbone.layers.{at}.{part}_proj": _NVFP4_LAYER
                            for at in _NVFP4_IN_MAMBA
                            for part in ("up", "down")
                        },
                    },
                }
            },
            model="quantized-mamba",
            plain_in=r"layers\.2\.mixer\.o_proj",
            others=(r"layers\.[02]\.mixer", fp8_tensor),
        ),
        "modelopt-mixed-hybrid-moe": Case(
            nvfp4_modelopt,
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "ignore": ["lm_head", "mtp*", *_PLAIN_IN_HYBRIDS],
                "quantized_layers": {
                    f"model.layers.{layer}.mlp.experts": {
                        **_NVFP4_LAYER,
                        "quant_algo": "W4A16_NVFP4",
                    }
                    for layer in range(4)
                },
            },
            model="quantized-hybrid-moe",
            plain_in=r"^(?!.*\.experts\.)",
        ),
        "mxfp4-gpt-oss": Case(
            mx_packed,
            {
                "quant_method": "mxfp4",
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
            },
            model="quantized-gpt-oss",
            plain_in="self_attn",
        ),
        "ct-int8": Case(int8, _compressed("int-quantized", _INT8, _INT8_INPUTS)),
        "ct-int8-moe": Case(
            int8, _compressed("int-quantized", _INT8, _INT8_INPUTS), model="quantized-moe"
        ),
        "ct-int8-tensor-static-merged": Case(
            lambda weight: int8(weight, per_tensor=True, static=True),
            _compressed(
                "int-quantized",
                _group("tensor", 8, "int"),
                {**_group("tensor", 8, "int", dynamic=False), "symmetric": False},
            ),
            model="quantized-phi",
        ),
        "ct-int8-multipliers": Case(
            int8, _compressed("int-quantized", _INT8), model="quantized-falcon"
        ),
        "ct-mxfp8": Case(
            mxfp8, _compressed("mxfp8-quantized", _MXFP8, {**_MXFP8, "dynamic": True})
        ),
        "modelopt-mxfp8-moe": Case(
            mxfp8,
            {
                "quant_method": "modelopt",
                "quantization": {
                    "quant_algo": "MXFP8",
                    "kv_cache_quant_algo": None,
                    "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"],
                },
            },
            model="quantized-moe",
        ),
        "modelopt-fp8-blocks": Case(
            fp8_blocks_of_modelopt,
            None,
            modelopt={"quantization": {"quant_algo": "fp8_pb_wo", "exclude_modules": ["lm_head"]}},
        ),
        "modelopt-mixed-in-8-bits-moe": Case(
            mxfp8,
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "ignore": ["lm_head"],
                "quantized_layers": {
                    **{
                        f"model.layers.{layer}.self_attn.{part}_proj": {"quant_algo": "FP8_PB_WO"}
                        for layer in range(2)
                        for part in "qkvo"
                    },
                    **{
                        f"model.layers.{mlp}": {"quant_algo": "MXFP8", "group_size": 32}
                        for mlp in ("0.mlp", "1.mlp.experts")
                    },
                },
            },
            model="quantized-moe",
            others=("self_attn", fp8_blocks_of_modelopt),
        ),
        "auto-round-by-name": Case(
            lambda weight: (
                auto_round(weight, bits=8, group=32) if _is_narrow(weight) else auto_round(weight)
            ),
            {
                **_AUTO_ROUND,
                "extra_config": {
                    "model.layers.0.mlp.down_proj": _OF_8_BITS,
                    "model.layers.1.mlp.down_proj": _OF_8_BITS,
                    r".*self_attn\.[kv]_proj": _OF_8_BITS,
                    r"(up|down|[kv])_proj$": _LEFT_PLAIN,  # the first that matches counts
                    r"mlp\.up": {"bits": 4, "sym": True},
                },
            },
            plain_in="up_proj",
        ),
        "auto-round-asymmetric-moe": Case(
            lambda weight: auto_round(weight, group=32, symmetric=False),
            {
                **_AUTO_ROUND,
                "quant_method": "intel/auto-round",
                "group_size": 32,
                "sym": False,
                "block_name_to_quantize": "model.layers",
                "extra_config": {
                    "model.layers.0.mlp.gate": _LEFT_PLAIN,
                    "model.layers.1.mlp.gate": _LEFT_PLAIN,
                },
            },
            model="quantized-moe",
        ),
        "auto-round-head": Case(
            auto_round,
            {
                **_AUTO_ROUND,
                "packing_format": None,
                "backend": "auto_round:gptq:exllamav2",
                "extra_config": {"lm_head": {"bits": 4, "data_type": "int"}},
            },
            has_head=True,
        ),
        "auto-round-awq": Case(
            lambda weight: awq(weight, group=64),
            {
                **_AUTO_ROUND,
                "packing_format": "auto_round:auto_awq",
                "group_size": 64,
                "modules_to_not_convert": ["lm_head"],
            },
        ),
    }
)
_PROJECTION: Final = (
    r"(model|backbone)\.layers\..*(_proj(_qkv|_z|_qkvz|_with_mqa)?|indexer\.(wq_b|wk))\.weight"
)
_IN_TURN: Final = r".*\.experts\.(gate_up|down)_proj"


def write_quantized(case: str, folder: Path) -> Any:
    """Write the checkpoint of a case to ``folder``; returns a transformers model with the numbers
    that the quantized weights stand for."""
    what = CASES[case]
    projections = _PROJECTION + (r"|lm_head\.weight" if what.has_head else "")
    theirs = write_with(
        what.pack,
        folder,
        model=what.model,
        projections=projections,
        plain_in=what.plain_in,
        others=what.others,
    )
    if what.stacked is not None:
        path = folder / "model.safetensors"
        stack_experts(path, interleaved=what.stacked == "interleaved")
    config = json.loads((folder / "config.json").read_text())
    if what.config is not None:
        config["quantization_config"] = dict(what.config)
    (folder / "config.json").write_text(json.dumps(config))
    if what.modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(dict(what.modelopt)))
    return theirs


def stack_experts(path: Path, *, interleaved: bool) -> None:
    """Make one tensor of all experts, with gates and ups ``interleaved`` as in gpt-oss, or with
    gates above ups as in newer versions of transformers."""
    tensors = load_file(path)
    modules = {match[1] for name in tensors if (match := re.match(r"(.*experts)\.\d", name))}
    for module in modules:
        kinds = {"weight": "", "weight_scale_inv": "_scale_inv"}
        if interleaved:
            kinds = {"weight_packed": "_blocks", "weight_scale": "_scales"}
        for old, new in kinds.items():
            held = [name for name in tensors if name.startswith(module) and name.endswith(old)]
            of = {
                part: torch.stack([tensors.pop(name) for name in sorted(held) if part in name])
                for part in ("gate_proj", "up_proj", "down_proj")
            }  # [experts, rows, width] each
            gate_up = torch.cat([of["gate_proj"], of["up_proj"]], dim=1)
            if interleaved:
                gate_up = torch.stack([of["gate_proj"], of["up_proj"]], dim=2).flatten(1, 2)
            for name, stack in (("gate_up_proj", gate_up), ("down_proj", of["down_proj"])):
                if new == "_blocks":
                    stack = stack.view(*stack.shape[:2], -1, 16)
                tensors[f"{module}.{name}{new}"] = stack
    save_file(tensors, path)


def pack_experts(pack: Pack, weights: Tensor) -> Packed:
    """Pack [experts, inputs, outputs] in MXFP4 as gpt-oss does: outputs before inputs."""
    found = [pack(weight.T.contiguous()) for weight in weights]
    codes = torch.stack([parts["weight_packed"] for parts, _ in found])
    tensors = {
        "_blocks": codes.view(*codes.shape[:2], -1, 16),
        "_scales": torch.stack([parts["weight_scale"] for parts, _ in found]),
    }
    return tensors, torch.stack([numbers.T for _, numbers in found])


def pack_apart(pack: Pack, name: str, weights: Tensor) -> Packed:
    """Pack Llama 4's [experts, inputs, outputs] as separate modules of each expert, as tools that
    quantize linear layers write them."""
    experts, _, last = name.rpartition(".")
    names = ["down_proj"] if last == "down_proj" else ["gate_proj", "up_proj"]
    tensors: dict[str, Tensor] = {}
    stacks = []
    for expert, weight in enumerate(weights):
        columns = []
        for part, own in zip(names, weight.chunk(len(names), dim=1), strict=True):
            packed_parts, numbers = pack(own.T.contiguous())
            module = f"{experts}.{expert}.{part}"
            tensors |= {f"{module}.{kind}": values for kind, values in packed_parts.items()}
            columns.append(numbers.T)
        stacks.append(torch.cat(columns, dim=1))
    return tensors, torch.stack(stacks)


def write_with(
    pack: Pack,
    folder: Path,
    *,
    model: str,
    projections: str = _PROJECTION,
    plain_in: str | None = None,
    others: tuple[str, Pack] | None = None,
) -> Any:
    """Write a checkpoint whose projections are packed with ``pack``, except those whose names
    contain a match of ``plain_in``, and those that ``others`` matches and packs."""
    write_model(model, folder / "numbers")
    path = folder / "numbers" / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        numbers[name] = tensor
        if re.fullmatch(projections, name) and not (plain_in and re.search(plain_in, name)):
            is_other = others is not None and re.search(others[0], name)
            parts, numbers[name] = (others[1] if others and is_other else pack)(tensor)
            module = name.removesuffix("weight")
            tensors |= {f"{module}{part}": values for part, values in parts.items()}
        elif re.fullmatch(_IN_TURN, name) and "feed_forward" in name:
            parts, numbers[name] = pack_apart(pack, name, tensor)
            tensors |= parts
        elif re.fullmatch(_IN_TURN, name):
            parts, numbers[name] = pack_experts(pack, tensor)
            tensors |= {f"{name}{part}": values for part, values in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((folder / "numbers" / "config.json").read_text())
    save_file(numbers, path, {"format": "pt"})
    model_class: Any = AutoModelForCausalLM
    return model_class.from_pretrained(folder / "numbers", dtype=torch.float32).eval()
