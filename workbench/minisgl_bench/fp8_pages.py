"""`minisgl bench fp8-pages`: how far logits move when keys and values are kept in 8 bits.

The same prompts go through the model over pages of its own dtype and over float8 pages, and the
logits of all positions are compared. On a CPU the kernels' twins compute them, with the same
rounding of pages.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch

from minisgl_backend.models.build import build_model
from minisgl_backend.models.kv_scales import read_kv_scales
from minisgl_backend.parallel.group import OneRank
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


@click.command("fp8-pages")
@prompts_options("a checkpoint")
@json_option
def fp8_pages(model: Path, prompts: int, length: int, json_path: Path | None) -> None:
    """How much fp8 pages change logits, compared with 16-bit pages."""
    device = first_device()
    spec = comparable_spec(model, length)
    decoder = build_model(
        spec,
        model,
        dtype=torch.bfloat16,
        device=device,
        group=OneRank(),
        max_sequence_length=length,
    )
    scales = read_kv_scales(model, len(spec.all_layers), spec.names)
    ids = random_prompts(spec, prompts, length)
    expected, found = (
        logits_over(decoder, ids.to(device), kv_dtype=dtype, scales=scales)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    report = logits_report("logits over fp8 pages", model, device)
    report.add(positions=len(found), **differences(expected, found))
    report.emit(json_path)
