"""LoRA adapters with random numbers, in PEFT's format: what tests, checks and benchmarks load.

Knows the names and shapes of projections from a model's spec. Must not know engines or servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minisgl_backend.models.spec import ModelSpec


def write_adapter(
    folder: Path,
    spec: ModelSpec,
    *,
    rank: int,
    targets: Sequence[str] | None = None,
    strength: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Write an adapter of one rank for the model, by default for all projections that take
    adapters; returns its folder.

    The deltas of a projection are ``strength`` times as large as its input; 0 makes an adapter that
    changes nothing. ``fields`` are added to the config.
    """
    chosen = tuple(dict.fromkeys(name.rpartition(".")[2] for name, _, _ in adapted_shapes(spec)))
    chosen = chosen if targets is None else tuple(targets)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, outs, ins in adapted_shapes(spec):
        if name.rpartition(".")[2] in chosen:
            a = torch.randn(rank, ins, generator=generator) * ins**-0.5
            b = torch.randn(outs, rank, generator=generator) * (strength / 2 * rank**-0.5)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(chosen),
        "bias": "none",
        **fields,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def adapted_shapes(spec: ModelSpec) -> Iterator[tuple[str, int, int]]:
    """Each projection that takes adapters: its name, outputs and inputs."""
    hidden, moe = spec.hidden_size, spec.moe
    for layer in range(spec.num_layers):
        if spec.attends(layer):
            heads = spec.heads_of(layer)
            queries, keys = (n * heads.head_dim for n in (heads.num_heads, heads.num_kv_heads))
            attention = f"model.layers.{layer}.self_attn"
            times = 2 if spec.gates_in_queries else 1
            yield f"{attention}.q_proj", queries * times, hidden
            if spec.gates_apart:
                yield f"{attention}.gate_proj", spec.num_gates(layer), hidden
            if spec.kv_source(layer) == layer:
                yield f"{attention}.k_proj", keys, hidden
                if layer not in spec.kv.keys_are_values:
                    yield f"{attention}.v_proj", keys, hidden
            yield f"{attention}.o_proj", hidden, queries
        if not spec.has_part(layer, "feed-forward"):
            continue
        block, inner = f"model.layers.{layer}.mlp", spec.intermediate_size_of(layer)
        if moe is not None and layer in moe.layers:
            shared = moe.experts.shared
            if shared is None:
                continue
            block, inner = f"{block}.{shared.name}", shared.intermediate_size
        if spec.gate is not None:
            yield f"{block}.gate_proj", inner, hidden
        yield f"{block}.up_proj", inner, hidden
        yield f"{block}.down_proj", hidden, inner
