"""What options say about the values that a request leaves out.

Knows the options, and what a checkpoint recommends (``sampling_defaults``). Must not know requests.
"""

from __future__ import annotations

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, RequestError
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.models.recommended_sampling import recommended_sampling
from minisgl_backend.wire.defaults import Defaults
from minisgl_backend.wire.gather import gather_values


def request_defaults(options: EngineOptions) -> Defaults:
    """Raises ``ConfigError`` if the checkpoint recommends what no request could ask for."""
    sampling = {}
    if options.sampling_defaults == "model":
        folder = resolve_model(options.model, options.model_source)
        try:
            sampling = gather_values(recommended_sampling(folder))
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from None
    return Defaults(sampling, options.parse_special_tokens, options.exclude_input_in_output)
