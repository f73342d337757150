"""What a transformers model computes with a LoRA adapter: PEFT's formula, in plain torch."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")


def merged(model: Any, folder: Path) -> Any:
    """A copy of the model with an adapter of one rank and scaling merged into its weights."""
    copied = copy.deepcopy(model)
    config = json.loads((folder / "adapter_config.json").read_text())
    root = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in copied.named_modules():
            key = f"base_model.model.{name}.lora_A.weight"
            if isinstance(module, nn.Linear) and key in tensors:
                b = tensors.pop(key.replace("lora_A", "lora_B")).float()
                delta = b @ tensors.pop(key).float() * (config["lora_alpha"] / root)
                module.weight += delta.to(module.weight.dtype)
    assert not tensors
    return copied


def write_adapter_of(model: Any, folder: Path, *, rank: int, targets: Sequence[str] | str) -> Path:
    """A random adapter, with the names that the modules have in transformers. ``targets`` are last
    parts of these names, or a pattern of whole names."""
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(targets, str):
            is_target = re.fullmatch(targets, name) is not None
        else:
            is_target = name.rpartition(".")[2] in targets
        if isinstance(module, nn.Linear) and is_target:
            outs, ins = module.weight.shape
            a = torch.randn(rank, ins, generator=generator) * ins**-0.5
            b = torch.randn(outs, rank, generator=generator) * (rank**-0.5 / 2)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = targets if isinstance(targets, str) else list(targets)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
