"""LoRA adapters as folders of files, and PEFT's way to compute with them, in plain torch.

PEFT itself is compared with in ``test_adapters`` if it is installed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    rank: int,
    targets: Sequence[str] = (*ATTENTION, *MLP),
    alpha: float | None = None,
    seed: int = 0,
    zeros: bool = False,
    **config: Any,
) -> Path:
    """An adapter for a model of transformers, with random numbers; its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            a = torch.randn(rank, module.in_features, generator=generator)
            b = torch.randn(module.out_features, rank, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a * module.in_features**-0.5
            tensors[f"base_model.model.{name}.lora_B.weight"] = (b * (not zeros)) * rank**-0.5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank if alpha is None else alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged(model: nn.Module, folder: Path, *, scaling: float) -> nn.Module:
    """A copy of the model with an adapter of one rank and scaling merged into its weights."""
    copied = copy.deepcopy(model)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in copied.named_modules():
            key = f"base_model.model.{name}.lora_A.weight"
            if isinstance(module, nn.Linear) and key in tensors:
                b = tensors[key.replace("lora_A", "lora_B")]
                module.weight += scaling * (b @ tensors[key])
    return copied
