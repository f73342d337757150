"""The logits of a model for the same prompts, computed in different ways and compared.

For benchmarks that say how far logits move when something is kept in fewer bits. Must not know what
that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import Chunks
from minisgl_backend.attention.own_kernels import TritonPrefill
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.paged_kv import KVScale, PagedKV
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder, LayersOutput
from minisgl_backend.models.spec import ModelSpec
from minisgl_bench.option_groups import Command, with_options
from minisgl_kit.option_types import POSITIVE_INT
from minisgl_kit.report import Report

PAGE_SIZE: Final = 16


def prompts_options(checkpoint: str) -> Callable[[Command], Command]:
    """``--model``, ``--prompts`` and ``--length`` of a command that compares logits;
    ``checkpoint`` says in its help which models it takes."""
    options = (
        click.option(
            "--model",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            default=DEMO_MODEL,
            help=f"folder of {checkpoint}  [default: the demo model]",
        ),
        click.option(
            "--prompts", default=16, type=POSITIVE_INT, show_default=True, help="of random tokens"
        ),
        click.option(
            "--length", default=256, type=POSITIVE_INT, show_default=True, help="tokens of a prompt"
        ),
    )
    return lambda command: with_options(command, options)


def comparable_spec(folder: Path, length: int) -> ModelSpec:
    """The spec of a checkpoint whose logits ``logits_over`` computes, for prompts of ``length``.

    Raises ``ConfigError`` for one with recurrent states, and for prompts of several sections, or
    beyond the model's context.
    """
    spec = load_spec(folder)
    if spec.recurrent is not None:
        raise ConfigError(f"{spec.architecture} has recurrent layers, which are not compared")
    if (section := spec.attention_shape().for_context(length).section) is not None:
        raise ConfigError(f"{spec.architecture} attends in sections: --length must be <= {section}")
    if length > spec.context:
        raise ConfigError(f"--length must be <= {spec.context}, the model's context")
    return spec


def first_device() -> torch.device:
    """The first GPU, or else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_prompts(spec: ModelSpec, num_prompts: int, length: int) -> Tensor:
    """Token ids, int64 [num_prompts, length]: the same at every call."""
    ids = np.random.default_rng(0).integers(0, spec.vocab_size, (num_prompts, length))
    return torch.from_numpy(ids)


def logits_report(title: str, model: Path, device: torch.device) -> Report:
    """A report without rows yet."""
    info = {"model": model.name, "device": device.type, "torch": torch.__version__}
    return Report(title, info=info)


def logits_over(
    model: Decoder, ids: Tensor, *, kv_dtype: torch.dtype, scales: Sequence[KVScale] | None = None
) -> Tensor:
    """float32 [num_prompts * length, vocab_size], of prompts [num_prompts, length] on the model's
    device, over pages of ``kv_dtype``, to which the model stays bound."""
    storage = KVStorage(
        model.spec.attention_shape(1),
        num_pages=-(-ids.shape[1] // PAGE_SIZE),
        page_size=PAGE_SIZE,
        dtype=kv_dtype,
        device=ids.device,
        scales=scales,
    )
    model.bind_pages(storage.layers)
    return torch.cat([logits_of(model, prompt).float() for prompt in ids])


@torch.inference_mode()
def logits_of(model: Decoder, ids: Tensor, adapted: AdaptedTokens | None = None) -> Tensor:
    """[len(ids), vocab_size] of a prompt that takes the model's pages from the first one on.
    ``adapted``: its tokens by adapter, if any has one."""
    attention, length = TritonPrefill(model.spec.attention_shape(1)), len(ids)
    positions = torch.arange(length, dtype=torch.int32, device=ids.device)
    chunks = Chunks(
        rows=positions[:1],
        offsets=torch.tensor([0, length], dtype=torch.int32, device=ids.device),
        ends=torch.tensor([length], dtype=torch.int32, device=ids.device),
        page_table=torch.arange(-(-length // PAGE_SIZE), device=ids.device)[None].int(),
        host_offsets=np.array([0, length], np.int32),
        host_ends=np.array([length], np.int32),
        max_length=length,
        max_end=length,
    )

    attend_chunks = attention.plan_chunks(chunks)

    def attend(q: Tensor, kv: PagedKV, layer: int) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend_chunks(out, q, kv, layer)
        return out

    found: LayersOutput = model(ids, positions, positions, attend, adapted=adapted)
    return model.logits(found.residual)


def differences(expected: Tensor, found: Tensor) -> dict[str, float]:
    """How far logits [positions, vocab_size] differ. ``largest_margin_changed`` is the largest lead
    of an expected best token over the second at a position where another token is best now."""
    apart = (found - expected).abs()
    best, second = expected.topk(2, dim=-1).values.unbind(dim=-1)
    changed = found.argmax(dim=-1) != expected.argmax(dim=-1)
    return {
        "largest_difference": float(apart.max()),
        "mean_difference": float(apart.mean()),
        "spread_of_logits": float(expected.std(dim=-1).mean()),
        "best_token_changed": float(changed.float().mean()),
        "largest_margin_changed": float((best - second)[changed].max()) if changed.any() else 0.0,
    }
