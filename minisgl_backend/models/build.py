"""A model, ready to compute, from its spec and its folder.

Modules are first made on the meta device, so that nothing is allocated or initialized twice.
"""

from __future__ import annotations

from pathlib import Path

import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear, lay_out_by_input
from minisgl_backend.layers.weight_place import collect_places
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.kv_scales import is_kv_scale
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weights import fill_random, load_weights
from minisgl_backend.parallel.group import Group


def build_model(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    load_format: str = "auto",
    max_sequence_length: int | None = None,
    seed: int = 0,
) -> Decoder:
    """This rank's part of the model in ``folder``.

    ``load_format`` ``auto`` reads safetensors; ``dummy`` fills random weights by ``seed`` and does
    not look for any. ``max_sequence_length`` bounds the positions, by default to the model's
    context. Raises ``ConfigError`` where the checkpoint does not fit the spec.
    """
    with torch.device("meta"):
        model = Decoder(spec, group)
    model = model.to(dtype).to_empty(device=device)
    if device.type == "cpu":
        for module in model.modules():
            if isinstance(module, (MergedColumnLinear, RowLinear)):
                lay_out_by_input(module.weight)
    if load_format == "dummy":
        fill_random(model, seed)
    elif load_format == "auto":

        def is_ignored(name: str) -> bool:
            return is_kv_scale(name) or (spec.tie_embeddings and name == "lm_head.weight")

        load_weights(
            collect_places(model), folder, is_ignored=is_ignored, shows_progress=group.rank == 0
        )
    else:
        raise ConfigError(f"load_format must be auto or dummy, got {load_format!r}")
    model.set_positions(max_sequence_length or spec.context, device)
    return model.eval()
