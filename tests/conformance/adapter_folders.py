"""What a model of transformers computes with a LoRA adapter: PEFT's formula, in plain torch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


def merged(model: Any, folder: Path) -> Any:
    """A copy of the model with an adapter, all of one rank and scaling, in its weights."""
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
