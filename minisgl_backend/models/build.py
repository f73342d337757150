"""A model, ready to compute, from its spec and its folder.

Modules are first made on the meta device, so that nothing is allocated or initialized twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from torch import nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.gemm import DenseMatrix, Matrix
from minisgl_backend.layers.linear import MakeMatrix
from minisgl_backend.layers.weight_place import collect_places
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.kv_scales import is_kv_scale
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.weights import fill_random, load_weights
from minisgl_backend.parallel.group import Group
from minisgl_backend.progress import Progress, unseen

MATRICES: Final[Mapping[str, MakeMatrix]] = MappingProxyType({"dense": DenseMatrix.of})
"""By ``ModelSpec.weight_format``."""


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
    fused: bool | None = None,
    fused_experts: bool | None = None,
    progress: Progress = unseen,
) -> Decoder:
    """This rank's part of the model in ``folder``.

    ``load_format`` ``auto`` reads safetensors; ``dummy`` makes random weights from ``seed`` and
    reads none. ``max_sequence_length`` bounds the positions, by default to the model's context.
    ``fused`` and ``fused_experts``: computed by this package's kernels, by default on a GPU. Raises
    ``ConfigError`` if the checkpoint does not fit the spec.
    """
    on_gpu = device.type == "cuda"
    with torch.device("meta"):
        model = Decoder(
            spec,
            group,
            fused=on_gpu if fused is None else fused,
            fused_experts=on_gpu if fused_experts is None else fused_experts,
            make=MATRICES[spec.weight_format],
        )
    _cast(model, dtype)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Matrix):
            module.lay_out(device)
    if load_format == "dummy":
        fill_random(model, seed)
    elif load_format == "auto":

        def is_ignored(name: str) -> bool:
            return is_kv_scale(name) or (spec.tie_embeddings and name == "lm_head.weight")

        load_weights(collect_places(model), folder, is_ignored=is_ignored, progress=progress)
    else:
        raise ConfigError(f"load_format must be auto or dummy, got {load_format!r}")
    model.set_positions(max_sequence_length or spec.context, device)
    return model.eval()


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters ``dtype``; a matrix decides for itself which of its own have it."""
    if isinstance(module, Matrix):
        module.cast(dtype)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)
    for child in module.children():
        _cast(child, dtype)
