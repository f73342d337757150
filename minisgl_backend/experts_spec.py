"""A mixture of experts as config.json describes it: plain facts, without tensors.

``models.families`` reads an ``ExpertsSpec``; the layer (``layers.experts``) and its kernels
(``kernels.moe``) compute by it. Must not know these, nor how architectures spell config.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """Which ``top_k`` of ``num_experts`` experts a token takes, and with which weights.

    A router's logits become scores: their softmax, or with ``sigmoid`` the sigmoid of each. The
    experts of the highest scores are taken; if ``corrected``, of the highest sums of score and a
    learned number of the expert, which evens out their loads (arXiv 2408.15664). If not all groups
    of neighbouring experts count, those ``top_groups`` do whose two best experts have the highest
    sum. A weight is the expert's score, without that number; with ``normalize`` divided by the sum
    over the token's experts; times ``scale``; if ``scaled``, times another learned number of the
    expert. Raises ``ConfigError`` if the numbers do not go together.
    """

    num_experts: int
    top_k: int
    normalize: bool
    sigmoid: bool = False
    corrected: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    scaled: bool = False

    def __post_init__(self) -> None:
        most, of_group = self.num_experts, self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"a router cannot take {self.top_groups} of {self.num_groups} groups of "
                f"{self.num_experts} experts (topk_group, n_group, number of experts)"
            )
        if self.limits_groups:
            most = self.top_groups * of_group
            if of_group < 2:
                raise ConfigError(f"n_group {self.num_groups} makes groups of a single expert")
        if self.top_k > most:
            raise ConfigError(f"num_experts_per_tok must be at most {most}, got {self.top_k}")

    @property
    def limits_groups(self) -> bool:
        """Whether there are groups that do not count."""
        return self.top_groups < self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """A feed-forward block that every token takes beside its experts.

    ``name`` is its own in the checkpoint. With ``gated``, its result is multiplied by the sigmoid
    of one more projection of the token, of that name and ``_gate``.
    """

    name: str
    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate: (up + 1) * gate * sigmoid(alpha * gate), with the gate at most ``limit`` and
    up within ``limit`` of 0; in place of silu(gate) * up."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class GeluGate:
    """Gemma 4's gate: gelu(gate) * up, with GELU as tanh approximates it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer, gated MLPs of ``intermediate_size``.

    ``gate``: the function that gates them, None for SiLU. ``biases``: their projections and the
    router have them. ``router`` is the router's name in the checkpoint. ``interleaved``: the
    checkpoint has one tensor for all experts, in which the outputs of gates and ups alternate, as
    gpt-oss has them; in plain ones inputs come before outputs. ``scales_inputs``: the weight of a
    token's only expert multiplies the expert's input, not its output. Raises ``ConfigError`` if
    tokens may then take several.
    """

    routing: RoutingRule
    intermediate_size: int
    shared: SharedExpert | None = None
    gate: ClampedGate | GeluGate | None = None
    biases: bool = False
    router: str = "gate"
    interleaved: bool = False
    scales_inputs: bool = False

    def __post_init__(self) -> None:
        if self.scales_inputs and self.routing.top_k != 1:
            raise ConfigError(
                f"num_experts_per_tok must be 1, got {self.routing.top_k}: of several experts of a "
                "token each would read another input"
            )

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def num_rows(self) -> int:
        """Of all weights, of as many numbers as the hidden size each: three to an intermediate
        feature, one to an expert in the router."""
        rows = self.num_experts * (3 * self.intermediate_size + 1)
        if self.shared is not None:
            rows += 3 * self.shared.intermediate_size + self.shared.gated
        return rows
