"""Adapters as they travel from files to slots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.adapter_files import AdapterFile, open_adapter
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.parallel.group import OneRank
from minisgl_kit.adapters import write_adapter
from tests.conformance.checkpoints import CONTEXT, write_checkpoint

CPU = torch.device("cpu")
RANK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3", folder)
    return folder


def slots_of(folder: Path, dtype: torch.dtype) -> AdapterSlots:
    model = build_model(
        load_spec(folder),
        folder,
        dtype=dtype,
        device=CPU,
        group=OneRank(),
        max_sequence_length=CONTEXT,
    )
    return AdapterSlots(model, 2, 8, CPU)


def opened(slots: AdapterSlots, path: Path) -> AdapterFile:
    return open_adapter(path, slots.projections, slots.names, max_rank=8)


FIELDS: list[dict[str, Any]] = [
    {},
    {"lora_alpha": 5},
    {"lora_alpha": 5, "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 11}},
    {"layers_to_transform": [1]},
]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_slot_holds_the_scaled_factors(
    folder: Path, dtype: torch.dtype, stored: torch.dtype, fields: dict[str, Any], tmp_path: Path
) -> None:
    """B times the scaling, as float32 computes it, is rounded once."""
    write_adapter(tmp_path, load_spec(folder), rank=RANK, dtype=stored, **fields)
    path = tmp_path / "adapter_model.safetensors"
    held = load_file(path)
    if "layers_to_transform" in fields:
        held = {name: tensor for name, tensor in held.items() if ".layers.1." in name}
        save_file(held, path)
    slots = slots_of(folder, dtype)
    file = opened(slots, tmp_path)
    slots.write(2, slots.shape_of(file), slots.pack(file))
    for target in slots._targets:
        for layer, name in enumerate(target.names):
            a, b = target.a[layer, 1], target.b[layer, 1]
            if name not in file.factors:
                assert not a.any() and not b.any()
                continue
            of_a, of_b = (held[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            scaled = (of_b.float() * file.factors[name].scaling).to(dtype)
            assert torch.equal(a[:RANK], of_a.to(dtype)) and not a[RANK:].any()
            assert torch.equal(b[:, :RANK], scaled) and not b[:, RANK:].any()


@pytest.mark.parametrize(
    ("value", "wrong"), [(float("nan"), "not finite"), (4e4, "too large for torch.float16")]
)
def test_numbers_that_cannot_be_computed_with_are_refused(
    folder: Path, value: float, wrong: str, tmp_path: Path
) -> None:
    """The scaling, 2, makes the second one too large."""
    write_adapter(tmp_path, load_spec(folder), rank=RANK)
    path = tmp_path / "adapter_model.safetensors"
    held = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    held[name][-1, -1] = value
    save_file(held, path)
    slots = slots_of(folder, torch.float16)
    with pytest.raises(ConfigError, match=f"{name} of the adapter has numbers that are {wrong}"):
        slots.pack(opened(slots, tmp_path))
