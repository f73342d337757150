"""Reads the scales of float8 keys and values from checkpoints that were calibrated for them.

They are tensors of one number, two per layer, beside the projections. Tools name them differently:

    model.layers.N.self_attn.k_scale              llm-compressor, and vLLM's own name
    model.layers.N.self_attn.attn.k_scale         the same with the module that holds it
    model.layers.N.self_attn.k_proj.k_scale       ModelOpt
    model.layers.N.self_attn.k_proj.output_scale  compressed-tensors, older
    model.layers.N.self_attn.kv_scale             AutoFP8: one for both

and with v in place of k. A key is stored as k / scale, and multiplied by scale when it is read; so
are values.
Must not know pages, or whether they are float8.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Final

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.models.checkpoint import weight_files
from minisgl_backend.models.tensor_names import TensorNames
from minisgl_backend.models.weights import open_tensors

_NAME: Final = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<of>k|v|kv)_scale|(?P<proj>[kv])_proj\.(?:(?P=proj)_scale|output_scale))"
)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor of this name is a scale of keys or values."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(folder: Path, num_layers: int, names: TensorNames) -> tuple[KVScale, ...]:
    """The scales of each layer, 1 for layers that have none, from the checkpoint in ``folder``,
    which names its tensors by ``names``.

    Raises ``ConfigError`` for a scale that is not a single number, finite and above 0, for two
    names of the same scale, for a layer with only one of the two, and for an unknown layer.
    """
    found: dict[tuple[int, str], float] = {}
    for path, held in weight_files(folder, names).items():
        scales = [name for name in held if is_kv_scale(name)]
        if not scales:
            continue
        with open_tensors(path) as file:
            for name in scales:
                match = _NAME.fullmatch(name)
                assert match is not None
                layer = int(match["layer"])
                if layer >= num_layers:
                    raise ConfigError(f"the model has no place for {name} of the checkpoint")
                value = file.get_tensor(held[name].stored.name)
                if value.numel() != 1:
                    shape = tuple(value.shape)
                    raise ConfigError(f"{name} must be one number, its shape is {shape}")
                number = float(value)
                if not math.isfinite(number) or number <= 0:
                    raise ConfigError(f"{name} must be finite and above 0, it is {number}")
                for of in match["of"] or match["proj"]:
                    if (layer, of) in found:
                        raise ConfigError(f"{name} is a second scale of {of} in layer {layer}")
                    found[layer, of] = number
    for layer, of in found:
        other = "v" if of == "k" else "k"
        if (layer, other) not in found:
            raise ConfigError(
                f"layer {layer} of the checkpoint has a {of}_scale and no {other}_scale"
            )
    return tuple(
        KVScale(found.get((layer, "k"), 1.0), found.get((layer, "v"), 1.0))
        for layer in range(num_layers)
    )
