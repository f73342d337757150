"""Scales of float8 keys and values, from a checkpoint to the pages of its layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.kv_scales import read_kv_scales
from minisgl_backend.models.tensor_names import TensorNames
from minisgl_backend.parallel.group import OneRank
from tests.conformance.checkpoints import write_checkpoint
from tests.unit.models.config_jsons import QWEN_3_0_6B

ATTENTION = "model.layers.{}.self_attn."
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def write(folder: Path, scales: dict[str, Any]) -> Path:
    """A file with these tensors; names are relative to layer 1's attention, or begin with "LAYER ".

    The file has one other tensor, too.
    """
    tensors: dict[str, Tensor] = {"model.norm.weight": torch.ones(4)}
    for name, value in scales.items():
        layer, _, rest = name.rpartition(" ")
        tensors[ATTENTION.format(layer or 1) + rest] = torch.as_tensor(value)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "prefixes",
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_every_spelling(prefixes: tuple[str, str], tmp_path: Path) -> None:
    found = read_kv_scales(
        write(tmp_path, dict(zip(prefixes, (0.5, 0.25), strict=True))), 3, TensorNames()
    )
    assert found == (KVScale(), KVScale(0.5, 0.25), KVScale())


def test_one_number_for_both(tmp_path: Path) -> None:
    value = torch.tensor([0.125], dtype=torch.bfloat16)
    assert read_kv_scales(write(tmp_path, {"0 kv_scale": value}), 1, TensorNames()) == (
        KVScale(0.125, 0.125),
    )


def test_a_checkpoint_without_scales(tmp_path: Path) -> None:
    assert read_kv_scales(write(tmp_path, {}), 2, TensorNames()) == (KVScale(), KVScale())


def test_scales_in_several_files(tmp_path: Path) -> None:
    names = [ATTENTION.format(0) + "k_scale", ATTENTION.format(0) + "v_scale"]
    for index, name in enumerate(names):
        save_file({name: torch.tensor(index + 1.0)}, tmp_path / f"{index}.safetensors")
    located = {name: f"{index}.safetensors" for index, name in enumerate(names)}
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": located}))
    assert read_kv_scales(tmp_path, 1, TensorNames()) == (KVScale(1.0, 2.0),)


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"k_scale": 0.0, "v_scale": 1.0}, r"layers\.1\.self_attn\.k_scale must be finite and abo"),
        ({"k_scale": -1.0, "v_scale": 1.0}, r"k_scale must be finite and above 0, it is -1\.0"),
        ({"k_scale": 1.0, "v_scale": torch.nan}, "v_scale must be finite and above 0, it is nan"),
        ({"k_scale": 1.0, "v_scale": torch.inf}, "v_scale must be finite and above 0, it is inf"),
        ({"k_scale": [1.0, 2.0], "v_scale": 1.0}, r"must be one number, its shape is \(2,\)"),
        ({"k_scale": 1.0}, "layer 1 of the checkpoint has a k_scale and no v_scale"),
        ({"v_scale": 1.0}, "layer 1 of the checkpoint has a v_scale and no k_scale"),
        ({"kv_scale": 1.0, "attn.v_scale": 1.0}, "is a second scale of v in layer 1"),
        ({"2 k_scale": 1.0, "2 v_scale": 1.0}, r"no place for model\.layers\.2\.self_attn\."),
    ],
)
def test_malformed_scales_are_refused(scales: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_kv_scales(write(tmp_path, scales), 2, TensorNames())


def test_a_model_loads_beside_its_scales(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors |= {ATTENTION.format(0) + name: torch.tensor(0.5) for name in ("k_scale", "v_scale")}
    save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": SCHEME,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = load_spec(tmp_path)
    build_model(spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"), group=OneRank())
    assert read_kv_scales(tmp_path, spec.num_layers, TensorNames()) == (
        KVScale(0.5, 0.5),
        KVScale(),
    )


def quantization(**values: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": SCHEME, **values}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (quantization(quant_algo="FP8_KV"), "quant_algo FP8_KV is not supported"),
        (quantization(config_groups={"group_0": {}}), "config_groups without quant_algo"),
        (quantization(kv_cache_scheme=None), "neither quant_algo nor kv_cache_scheme is given"),
        (quantization(kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo 'NVFP4' is not supported"),
        (quantization(kv_cache_scheme={**SCHEME, "num_bits": 4}), "must be 8-bit floats with one"),
        (quantization(kv_cache_scheme={**SCHEME, "dynamic": True}), "must be 8-bit floats with o"),
        (quantization(kv_cache_scheme={**SCHEME, "strategy": "attn_head"}), "one scale a tensor"),
        (quantization(kv_cache_scheme="NVFP4"), "kv_cache_scheme 'NVFP4' is not supported"),
        (quantization(kv_cache_scheme=[8]), "kv_cache_scheme must be an object"),
    ],
)
def test_other_quantization_is_refused(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_spec({"architectures": ["Qwen3ForCausalLM"], "quantization_config": values})


def test_modelopt_may_name_the_scheme_of_keys_and_values() -> None:
    """As its versions up to 0.31 do, which also leave out ``quant_method``."""
    of_modelopt = {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "ignore": ["lm_head"]}
    spec = parse_spec({**QWEN_3_0_6B, "quantization_config": of_modelopt})
    assert spec.weights is not None and spec.weights.method == "modelopt"


def test_pages_carry_the_scales_of_their_layer() -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5, windows=(None, None))
    storage = KVStorage(
        shape,
        num_pages=1,
        page_size=2,
        dtype=torch.float8_e4m3fn,
        device=torch.device("cpu"),
        scales=[KVScale(0.5, 2.0), KVScale()],
    )
    first, second = storage.layers
    assert first.k_scale is not None
    assert first.v_scale is not None
    assert (first.k_scale.tolist(), first.v_scale.tolist()) == ([0.5], [2.0])
    assert first.scale == KVScale(0.5, 2.0)
    assert second.scale == KVScale()
