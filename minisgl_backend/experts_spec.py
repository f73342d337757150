"""A mixture of experts as config.json describes it: plain facts, without tensors.

``models.families`` reads an ``ExpertsSpec``; the layer (``layers.experts``) and its kernels
(``kernels.routing``, ``kernels.experts``) compute by it. Must not know these, nor how
architectures spell config.json.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minisgl_backend.errors import ConfigError
from minisgl_backend.gates import ClampedGate, ExpertsGate, Gate, LimitedGate


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """Which ``top_k`` of ``num_experts`` experts a token takes, and with which weights.

    A router's logits become scores: their softmax, or with ``sigmoid`` the sigmoid of each. The
    experts with the highest scores are taken; if ``corrected``, those with the highest sums of
    score and a learned bias of the expert, which evens out their loads (arXiv 2408.15664); with
    ``corrects_logits`` those with the highest sums of logit and bias. Experts are in ``num_groups``
    groups of neighbours; only ``top_groups`` groups count, those whose ``best_of_group`` best
    experts have the highest sums. The weight of an expert is its score, without the bias, times
    ``scale``; with ``normalize`` the score is first divided by the sum over the token's experts,
    and if ``scaled`` the weight is multiplied by a learned factor of the expert. If ``in_float32``,
    the checkpoint keeps routers in this type. Raises ``ConfigError`` if the numbers do not go
    together.
    """

    num_experts: int
    top_k: int
    normalize: bool
    sigmoid: bool = False
    corrected: bool = False
    corrects_logits: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    scaled: bool = False
    in_float32: bool = False

    def __post_init__(self) -> None:
        most, of_group = self.num_experts, self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"a router cannot take {self.top_groups} of {self.num_groups} groups of "
                f"{self.num_experts} experts (topk_group, n_group, number of experts)"
            )
        if self.limits_groups:
            most = self.top_groups * of_group
            if of_group < self.best_of_group:
                raise ConfigError(f"n_group {self.num_groups} makes groups of a single expert")
        if self.top_k > most:
            raise ConfigError(
                f"a token cannot take {self.top_k} of {most} experts "
                "(num_experts_per_tok, moe_k or moe_topk, number of experts)"
            )

    @property
    def wide(self) -> bool:
        """Whether logits are computed in float32, as in the training of such models."""
        return self.sigmoid or self.corrected or self.in_float32

    @property
    def limits_groups(self) -> bool:
        """Whether only some groups count."""
        return self.top_groups < self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpert:
    """A feed-forward block that every token takes in addition to its experts.

    ``name`` is its name in the checkpoint. With ``gated``, its result is multiplied by the sigmoid
    of one more projection of the token, which is named ``name`` with ``_gate`` appended. ``limit``
    is that of a ``LimitedGate``; None: the block has the gate of experts, without their limit.
    """

    name: str
    intermediate_size: int
    gated: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """The limits of gates in a layer, each that of a ``LimitedGate``: of its experts, and of the
    shared one. None: no limit."""

    of_experts: float | None = None
    of_shared: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of a layer, MLPs of ``intermediate_size``.

    ``gate`` gates them; None: they and ``shared`` have no gates, but the square of ReLU.
    ``biases``: their projections and the router have biases. ``router`` is the router's name in the
    checkpoint. ``interleaved``: the checkpoint has one tensor for all experts, in which the outputs
    of gates and ups alternate, as in gpt-oss; in plain tensors inputs come before outputs.
    ``scales_inputs``: the weight of a token's only expert multiplies the expert's input, not its
    output. Raises ``ConfigError`` if tokens may then take several. With a ``latent_size`` experts
    read and write as many numbers, between two projections that all of them share; the router and
    ``shared`` read hidden states.
    """

    routing: RoutingRule
    intermediate_size: int
    shared: SharedExpert | None = None
    gate: ExpertsGate | None = "silu"
    biases: bool = False
    router: str = "gate"
    interleaved: bool = False
    scales_inputs: bool = False
    latent_size: int | None = None

    def __post_init__(self) -> None:
        if self.scales_inputs and self.routing.top_k != 1:
            raise ConfigError(
                f"num_experts_per_tok must be 1, got {self.routing.top_k}: of several experts of a "
                "token each would read another input"
            )

    def limited(self, limits: GateLimits) -> ExpertsSpec:
        """The same with limits of gates, which are by SiLU."""
        assert self.gate == "silu"
        shared = None if self.shared is None else replace(self.shared, limit=limits.of_shared)
        gate = self.gate if limits.of_experts is None else LimitedGate(limits.of_experts)
        return replace(self, gate=gate, shared=shared)

    @property
    def gate_of_shared(self) -> Gate | LimitedGate | None:
        """The gate of ``shared``."""
        assert self.shared is not None and not isinstance(self.gate, ClampedGate)
        if self.shared.limit is not None:
            return LimitedGate(self.shared.limit)
        return "silu" if isinstance(self.gate, LimitedGate) else self.gate

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    def outer_size(self, hidden_size: int) -> int:
        """How many numbers experts read and write."""
        return self.latent_size or hidden_size

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights of experts, router and projections around them."""
        return self._weights_with(self.num_experts, hidden_size)

    def num_active_weights(self, hidden_size: int) -> int:
        """How many of them a token is multiplied by."""
        return self._weights_with(self.routing.top_k, hidden_size)

    def _weights_with(self, num_chosen: int, hidden_size: int) -> int:
        of_feature = 2 if self.gate is None else 3  # numbers that an expert reads and writes
        rows = self.num_experts
        if self.shared is not None:
            rows += of_feature * self.shared.intermediate_size + self.shared.gated
        if self.latent_size is None:
            return (rows + num_chosen * of_feature * self.intermediate_size) * hidden_size
        inner = num_chosen * of_feature * self.intermediate_size * self.latent_size
        return (rows + 2 * self.latent_size) * hidden_size + inner
