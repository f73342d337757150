"""The spec of an EAGLE-3 layer for a model, from the folder of the layer.

Knows how such checkpoints name their tensors. Like ``catalog``, it must not import torch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from minisgl_backend.models.checkpoint import has_embedding_of_its_own
from minisgl_backend.models.config_json import ConfigReader, read_json
from minisgl_backend.models.families.eagle_layers import read_eagle
from minisgl_backend.models.spec import EagleSpec, ModelSpec
from minisgl_backend.models.tensor_names import TensorNames

EAGLE_NAMES: Final = TensorNames(renamed=(("layers.0.", "midlayer."), ("d2t", "d2t.offsets")))
"""The names of a layer's tensors; the layer has one of two names."""
EAGLE_NEEDLESS: Final = frozenset({"t2d", "model.embed_tokens.weight"})
"""Tensors, by the names for the loader, that need no place: which tokens the output head has, and
an embedding that is the model's once more."""


def load_eagle(folder: Path, spec: ModelSpec, model: Path, *, has_weights: bool) -> EagleSpec:
    """The layer in ``folder`` for the model ``spec`` in its folder ``model``. Unless it
    ``has_weights``, nothing but config.json is read. Raises ``ConfigError``."""
    where = "config.json of speculative_mtp_model"
    eagle = read_eagle(ConfigReader(read_json(folder / "config.json"), where))
    own_embedding = eagle.layer.hidden_size != spec.hidden_size
    if has_weights and not own_embedding:
        own_embedding = has_embedding_of_its_own(folder, EAGLE_NAMES, model, spec.names)
    return replace(eagle, own_embedding=own_embedding)
