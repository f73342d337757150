"""The values of sampling parameters that a request leaves out (the option ``sampling_defaults``).

Knows the option, and what a checkpoint recommends. Must not know requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, RequestError
from minisgl_backend.models.catalog import recommended_sampling
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.wire.gather import gather_values


def sampling_defaults(options: EngineOptions) -> Mapping[str, Any]:
    """Values by the names of the parameters; those that are not there have the defaults of the
    wire. Raises ``ConfigError`` if the checkpoint recommends what no request could ask for."""
    if options.sampling_defaults != "model":
        return {}
    folder = resolve_model(options.model, options.model_source)
    try:
        return gather_values(recommended_sampling(folder))
    except RequestError as error:
        raise ConfigError(f"generation_config.json: {error}") from None
