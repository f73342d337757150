"""Where a model's layers normalize, and how, in plain numbers.

Knows the norms of the residual stream and of what is added to it, not those within attention. Must
not know config.json, tensors or the rest of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from minisgl_backend.errors import ConfigError

NormPlace: TypeAlias = Literal["before", "after", "around"]
"""A layer's parts normalize their inputs, or their outputs before they are added to the residual
stream, or both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormsSpec:
    """The norms of a model: RMSNorms with ``eps`` or, if they are ``centered``, LayerNorms, which
    first subtract the mean.

    With ``place`` "by mixer" layers with attention normalize outputs, and the others inputs. Norms
    of outputs have ``output_eps``, if it is not that of all others. ``offset`` is added to the
    weights of all norms, or of all but the final one if that has a ``final_offset``. Unless norms
    are ``weighted``, none of the residual stream has weights. Only LayerNorms may be ``biased``.
    With ``of_embedding`` the embeddings are normalized, too, without weights.
    """

    eps: float
    place: NormPlace | Literal["by mixer"] = "before"
    output_eps: float | None = None
    offset: float = 0.0
    final_offset: float | None = None
    weighted: bool = True
    centered: bool = False
    biased: bool = False
    of_embedding: bool = False

    def __post_init__(self) -> None:
        if self.centered and self.place != "before":
            raise ConfigError("norms that subtract the mean are supported only of inputs")
        if self.biased and not self.centered:
            raise ConfigError("norms with biases are supported only if they subtract the mean")
        assert self.weighted or (self.place == "before" and not self.biased)
