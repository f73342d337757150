"""How much host memory loading takes beyond the model itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SHARD = 40 * 2**20
NUM_SHARDS = 8
MARGIN = 96 * 2**20
"""Room for the Python modules that loading imports and for the weight being read: far below the 250
MiB of all shards."""

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": NUM_SHARDS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.parallel.group import OneRank

def resident(kind):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024

folder = Path(sys.argv[1])
spec = load_spec(folder)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
model = build_model(
    spec, folder, dtype=torch.bfloat16, device=torch.device("cpu"), group=OneRank()
)
of_model = sum(parameter.nbytes for parameter in model.parameters())
print(json.dumps({"beside": resident("VmHWM") - before - of_model, "of_model": of_model}))
"""


def write_shards(folder: Path) -> None:
    """Write one file of about ``SHARD`` bytes per layer."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ends = {"model.embed_tokens.weight": (1024, 1024), "model.norm.weight": (1024,)}
    weight_map: dict[str, str] = {}
    for number in range(NUM_SHARDS):
        shapes = {
            "input_layernorm": (1024,),
            "post_attention_layernorm": (1024,),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            **{f"self_attn.{name}_proj": (1024, 1024) for name in "qkvo"},
            "mlp.gate_proj": (4096, 1024),
            "mlp.up_proj": (4096, 1024),
            "mlp.down_proj": (1024, 4096),
        }
        named = {f"model.layers.{number}.{name}.weight": size for name, size in shapes.items()}
        tensors = {
            name: torch.zeros(size, dtype=torch.bfloat16)
            for name, size in {**named, **(ends if number == 0 else {})}.items()
        }
        file = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        assert SHARD * 0.75 < (folder / file).stat().st_size < SHARD
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux")
def test_loading_takes_one_shard_beside_the_model(tmp_path: Path) -> None:
    """A separate process loads eight 32 MiB shards; its peak includes the pages of the files."""
    write_shards(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], check=True, capture_output=True, text=True
    )
    found = json.loads(ended.stdout)
    assert found["of_model"] > 6 * SHARD
    assert found["beside"] < SHARD + MARGIN
