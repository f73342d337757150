"""What a checkpoint's generation_config.json recommends for the sampling of answers.

Must not know requests, or whether they take it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.models.config_json import read_json

_WITHOUT_EFFECT: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {"temperature": (1,), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
    | {"repetition_penalty": (1,)}
)
"""Parameters of sampling, with the values that leave the probabilities as they are."""


def recommended_sampling(folder: Path) -> dict[str, Any]:
    """What generation_config.json recommends for sampling, as far as it changes anything. Nothing
    is checked here."""
    path = folder / "generation_config.json"
    values = read_json(path) if path.exists() else {}
    if values.get("do_sample") is False:
        values = {**values, "temperature": 0.0}
    found = {name: values.get(name) for name in _WITHOUT_EFFECT}
    return {
        name: value
        for name, value in found.items()
        if value is not None and value not in _WITHOUT_EFFECT[name]
    }
