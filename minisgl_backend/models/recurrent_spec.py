"""The shapes of layers that keep a state of a fixed size for each row, in place of keys and values:
Gated DeltaNet, Kimi Delta Attention, Mamba 2 and short convolutions.

Plain numbers, for all layers of a kind together, and their share on one of several ranks. Must not
know files, tensors or what the layers compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from minisgl_backend.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """The Gated DeltaNet layers; ``layers`` are those that mix tokens in this way.
    ``state_dtype``: the type that the checkpoint names for states. Rates are sigmoids, times
    ``rate_scale``: with 2 a token may also turn round what the state has for its key. ``norm_eps``
    is that of the output's norm, by default the model's.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    layers: frozenset[int]
    state_dtype: str = "float32"
    rate_scale: float = 1.0
    norm_eps: float | None = None

    by_dimension: ClassVar[bool] = False
    """Whether each dimension of a key decays by itself."""

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape of a row's state besides the convolution's: a matrix for each head."""
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def updates(self) -> tuple[int, int, int, int]:
        """What a token adds to the matrices: the number of keys, of values, and their sizes."""
        return self.num_key_heads, self.num_heads, self.key_dim, self.value_dim

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        return hidden_size * (self.num_channels + 2 * self.value_size + 2 * self.num_heads)

    def of_rank(self, num_ranks: int) -> DeltaSpec:
        """The heads of one of ``num_ranks`` ranks; raises ``ConfigError`` if they do not split."""
        if self.num_key_heads % num_ranks:
            raise ConfigError(
                f"{self.num_key_heads} key heads of the delta rule cannot be split evenly over "
                f"{num_ranks} tensor-parallel ranks"
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_ranks,
            num_heads=self.num_heads // num_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec(DeltaSpec):
    """The layers with Kimi Delta Attention: Gated DeltaNet in which each dimension of a key has a
    decay of its own. All heads have keys and values, of the same size. Decays and gates of outputs
    go through as many numbers as a head has, unless they are ``direct`` projections of the input.
    ``least_decay`` is the least log of a decay, if there is one."""

    direct: bool = False
    least_decay: float | None = None

    by_dimension: ClassVar[bool] = True

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        others = hidden_size * (self.num_channels + self.num_heads + self.value_size)
        wide = self.key_size + self.value_size  # of decays and gates
        if self.direct:
            return others + hidden_size * wide
        return others + self.key_dim * (2 * hidden_size + wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """The Mamba 2 layers; ``layers`` are those that mix tokens in this way.

    Each of ``num_heads`` heads has ``head_dim`` values and a state of ``state_size`` numbers for
    each. Heads are in ``num_groups`` groups of neighbours, which share what writes and reads
    states, and are under one norm unless ``normed`` is false. ``conv_bias``, ``bias``: the
    convolution and the projections have biases. ``time_steps``: the least and the largest step,
    after softplus. ``state_dtype``: the type that the checkpoint names for states.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_width: int
    layers: frozenset[int]
    conv_bias: bool = True
    bias: bool = False
    normed: bool = True
    time_steps: tuple[float, float] = (0.0, math.inf)
    state_dtype: str = "float32"

    by_dimension: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"{self.num_heads} heads of Mamba cannot share {self.num_groups} groups"
            )

    @property
    def inner_size(self) -> int:
        """The values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def groups_size(self) -> int:
        """The numbers of B in all groups together, and as many of C."""
        return self.num_groups * self.state_size

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: values, and what writes and reads states."""
        return self.inner_size + 2 * self.groups_size

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape of a row's state besides the convolution's: a matrix for each head."""
        return self.num_heads, self.head_dim, self.state_size

    @property
    def updates(self) -> tuple[int, int, int, int]:
        """What a token adds to the matrices: the number of keys, of values, and their sizes."""
        return self.num_groups, self.num_heads, self.state_size, self.head_dim

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        return hidden_size * (self.num_channels + 2 * self.inner_size + self.num_heads)

    def of_rank(self, num_ranks: int) -> MambaSpec:
        """The heads of one of ``num_ranks`` ranks; raises ``ConfigError`` if they do not split. If
        there are more ranks than groups, several ranks have heads of the same one."""
        do_groups_split = self.num_groups % num_ranks == 0 or num_ranks % self.num_groups == 0
        if not do_groups_split or self.num_heads % num_ranks:
            raise ConfigError(
                f"{self.num_heads} heads of Mamba in {self.num_groups} groups cannot be split "
                f"evenly over {num_ranks} tensor-parallel ranks"
            )
        return replace(
            self,
            num_groups=max(1, self.num_groups // num_ranks),
            num_heads=self.num_heads // num_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec:
    """The layers whose tokens mix by a short convolution alone (LFM2); ``layers`` are those that
    mix tokens in this way. ``bias``: the convolution and the projections have biases.
    """

    num_channels: int
    conv_width: int
    layers: frozenset[int]
    bias: bool = False

    by_dimension: ClassVar[bool] = False

    @property
    def matrices(self) -> tuple[int, int, int]:
        """A row's state is only the convolution's."""
        return 0, 0, 0

    @property
    def updates(self) -> tuple[int, int, int, int]:
        """As in the other specs: tokens add nothing to matrices."""
        return 0, 0, 0, 0

    @property
    def state_dtype(self) -> str:
        """As in the other specs: of the matrices, which have no numbers here."""
        return "float32"

    def num_weights(self, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        return 4 * hidden_size * self.num_channels

    def of_rank(self, num_ranks: int) -> ConvSpec:
        """The channels of one of ``num_ranks`` ranks; raises ``ConfigError`` if they do not
        split."""
        if self.num_channels % num_ranks:
            raise ConfigError(
                f"{self.num_channels} channels of short convolutions cannot be split evenly over "
                f"{num_ranks} tensor-parallel ranks"
            )
        return replace(self, num_channels=self.num_channels // num_ranks)


RecurrentSpec: TypeAlias = DeltaSpec | MambaSpec | ConvSpec
"""The layers that keep a state of a fixed size for each row."""


def state_bytes(shape: RecurrentSpec, item_bytes: int, matrix_item_bytes: int) -> int:
    """The bytes of the states of one row or snapshot in all layers: inputs of convolutions, of
    ``item_bytes`` each, and matrices, of ``matrix_item_bytes`` a number."""
    inputs = shape.num_channels * (shape.conv_width - 1) * item_bytes
    return len(shape.layers) * (inputs + math.prod(shape.matrices) * matrix_item_bytes)
