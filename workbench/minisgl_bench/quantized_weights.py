"""`minisgl bench quantized-weights`: how far logits move when weights are kept in 8 or 4 bits.

The same prompts go through the model with its plain weights and with weights that are quantized
while they load, to the nearest numbers and without calibration; tools that calibrate lose less. The
weights of the layers are quantized, not those of the output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import click
import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import build_model
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.weight_format import (
    CONVERT_TO_FP8,
    GROUP_OF_NVFP4,
    Encoding,
    Layout,
    Rule,
    WeightFormat,
    WeightFormats,
)
from minisgl_bench.logits import (
    comparable_spec,
    differences,
    first_device,
    logits_over,
    logits_report,
    prompts_options,
    random_prompts,
)
from minisgl_kit.report import json_option

_FORMATS: Final[Mapping[str, tuple[Encoding, tuple[int | None, int | None], bool]]] = (
    MappingProxyType(
        {
            "fp8, blocks of 128 x 128": (Encoding.E4M3, (128, 128), True),
            "fp8, per channel": (Encoding.E4M3, (1, None), True),
            "int8, per channel": (Encoding.INT8, (1, None), True),
            "int4, groups of 128": (Encoding.INT4, (1, 128), True),
            "int4, groups of 128, zero points": (Encoding.INT4, (1, 128), False),
            "int4, groups of 32, zero points": (Encoding.INT4, (1, 32), False),
            "fp4, groups of 32 (mxfp4)": (Encoding.E2M1, (1, 32), True),
            "fp4, groups of 16 (nvfp4)": (Encoding.E2M1, (1, GROUP_OF_NVFP4), True),
        }
    )
)


@click.command("quantized-weights")
@prompts_options("a checkpoint with plain weights")
@json_option
def quantized_weights(model: Path, prompts: int, length: int, json_path: Path | None) -> None:
    """How much quantized weights change logits, compared with plain ones."""
    spec = comparable_spec(model, length)
    if spec.weights is not None:
        raise ConfigError(f"the weights of {model} are quantized already: {spec.weights}")
    device = first_device()
    ids = random_prompts(spec, prompts, length).to(device)
    exact = _logits(spec, model, ids)
    report = logits_report("logits with quantized weights", model, device)
    for name, (encoding, block, symmetric) in _FORMATS.items():
        form = WeightFormat(
            layout=Layout.CONVERTED, encoding=encoding, block=block, symmetric=symmetric
        )
        rules = tuple(Rule(rule.pattern, form) for rule in CONVERT_TO_FP8.rules)
        found = _logits(replace(spec, weights=WeightFormats("benchmark", rules)), model, ids)
        report.add(
            format=name, positions=len(found), **differences(exact, found), **kl(exact, found)
        )
    report.emit(json_path)


def _logits(spec: ModelSpec, folder: Path, ids: Tensor) -> Tensor:
    """``logits_over`` pages of the model's own dtype. On a CPU all computation is in float32."""
    dtype = torch.float32 if ids.device.type == "cpu" else torch.bfloat16
    model = build_model(
        spec,
        folder,
        dtype=dtype,
        device=ids.device,
        group=OneRank(),
        max_sequence_length=ids.shape[1],
    )
    return logits_over(model, ids, kv_dtype=dtype)


def kl(expected: Tensor, found: Tensor) -> dict[str, float]:
    """The Kullback-Leibler divergence of the next token's distribution, in nats: of what is found
    from what is expected. Logits are [positions, vocab_size]."""
    wanted = expected.double().log_softmax(dim=-1)
    divergence = (wanted.exp() * (wanted - found.double().log_softmax(dim=-1))).sum(dim=-1)
    return {"mean_kl": float(divergence.mean()), "largest_kl": float(divergence.max())}
