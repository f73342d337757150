"""Variations of attention over keys and values, in plain numbers.

Must not know config.json, tensors or the rest of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from minisgl_backend.gates import OutputGate

QKNorm: TypeAlias = Literal["head", "rotated", "token", "unweighted", "unweighted everywhere"]
"""How queries and keys are normalized: each head separately, before or after it is rotated, or all
heads of a token together; or each head without weights, in layers that rotate or in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresSpec:
    """The scores of attention: queries times keys times ``scale``, by default head_dim to the power
    of -1/2. If ``cap`` c is not 0, it then bounds scores s as c tanh(s / c). With ``sinks`` the
    softmax of each head has one more score, which is learned."""

    scale: float | None = None
    cap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGates:
    """Gates that multiply attention's output, made of its input: by a projection ``apart``, or by
    that of the queries. There is one for each number or, with ``one_per_head``, for each head; only
    gates that are apart can be that. ``function`` opens them."""

    apart: bool = False
    one_per_head: bool = False
    function: OutputGate = "sigmoid"

    def __post_init__(self) -> None:
        assert self.apart or not self.one_per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Where layers have their keys and values from (Gemma 4).

    The last layers may lack their own: for each layer, ``sources`` has the layer whose keys and
    values it reads; without entries, all have their own. With ``value_norm`` values are normalized
    by head, without weights; in the layers of ``keys_are_values`` the values are the projections of
    keys.
    """

    sources: tuple[int, ...] = ()
    value_norm: bool = False
    keys_are_values: frozenset[int] = frozenset()
