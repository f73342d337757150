"""The part of a decoder layer that computes each token separately.

Must not know rows, pages, or which layer it is in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar, cast

from torch import Tensor, nn

from minisgl_backend.gates import Activation, Gate, LimitedGate
from minisgl_backend.kernels.activation import activate, open_gates, xielu
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import WeightPlace, empty_parameter, even_share
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import TensorCores

_GateT = TypeVar("_GateT", bound=Gate | LimitedGate)


class FeedForward(Protocol):
    """One kind of this part."""

    def __call__(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        pdl: bool,
        adapted: AdaptedTokens | None = None,
    ) -> tuple[Tensor, Normed]:
        """The residual stream [num_tokens, hidden_size] after this part of the layer, and the same
        under ``norm``. ``x`` is the input under the layer's second norm; ``residual`` may be
        overwritten. ``adapted``: the tokens by adapter, if any has one.
        """

    def rounding(self, num_tokens: int) -> int | None:
        """If ``x`` is read only in 8 bits: how many neighbours share a scale."""


class _MLP(nn.Module, ABC):
    """A block with a projection to an inner width, of gates if it has them and of ups, and one back
    (``FeedForward``). The module of the first is named ``_INTO``."""

    _INTO: ClassVar[str]
    _PARTS: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: Group,
        matrices: Matrices,
        gate: Gate | None = None,
    ):
        """``name`` is the module's in the checkpoint, and ``gate`` is one that the first projection
        opens itself."""
        super().__init__()
        share = even_share(intermediate_size, group, "intermediate_size")
        parts = dict.fromkeys(self._PARTS, share)
        into = MergedColumnLinear(name, hidden_size, parts, bias=bias, matrices=matrices, gate=gate)
        self.add_module(self._INTO, into)
        self.down_proj = RowLinear(
            f"{name}.down_proj",
            intermediate_size,
            hidden_size,
            bias=bias,
            group=group,
            matrices=matrices,
        )

    def rounding(self, num_tokens: int) -> int | None:
        into = cast(MergedColumnLinear, getattr(self, self._INTO))
        return into.matrix.rounding(num_tokens)

    @abstractmethod
    def _inner(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None) -> Normed:
        """What ``down_proj`` reads, [num_tokens, this rank's share of intermediate_size]."""

    def forward(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        pdl: bool,
        adapted: AdaptedTokens | None = None,
    ) -> tuple[Tensor, Normed]:
        inner = self._inner(x, pdl=pdl, adapted=adapted)
        return self.down_proj.add_to(residual, inner, norm, pdl=pdl, adapted=adapted)

    def output(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """What ``forward`` adds, [num_tokens, hidden_size], for layers that change it first."""
        inner = self._inner(x, pdl=pdl, adapted=adapted)
        output: Tensor = self.down_proj(inner, pdl=pdl, adapted=adapted)
        return output

    def part(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """This rank's part of ``output``, to be summed over the ranks by the caller."""
        inner = self._inner(x, pdl=pdl, adapted=adapted)
        return self.down_proj.part(inner, pdl=pdl, adapted=adapted)


class _MLPWithGates(_MLP, Generic[_GateT]):
    """One with gates."""

    _INTO, _PARTS = "gate_up_proj", ("gate_proj", "up_proj")
    gate_up_proj: MergedColumnLinear

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: Group,
        matrices: Matrices,
        gate: _GateT,
    ):
        """``name`` is the module's in the checkpoint."""
        super().__init__(
            name,
            hidden_size,
            intermediate_size,
            bias=bias,
            group=group,
            matrices=matrices,
            gate=None if isinstance(gate, LimitedGate) else gate,
        )
        self._gate = gate


class GatedMLP(_MLPWithGates[Gate]):
    """The block of Llama and its successors (``FeedForward``): down(silu(gate(x)) * up(x)), or with
    another ``gate`` than silu."""

    def use_tensor_cores(self, kernels: TensorCores, *, adds: bool = True) -> None:
        """Compute steps that fit by ``kernels``, which the weights fit: ``forward`` or, unless it
        ``adds``, ``output`` and ``part``."""
        self.gate_up_proj.use_tensor_cores(kernels)
        self.down_proj.use_tensor_cores(kernels, adds=adds)

    def _inner(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None) -> Normed:
        return self.gate_up_proj.for_next(x, pdl=pdl, adapted=adapted)


class LimitedMLP(_MLPWithGates[LimitedGate]):
    """The same with a limit: a kernel of its own opens the gates (``FeedForward``)."""

    def _inner(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None) -> Normed:
        both = self.gate_up_proj(x, pdl=pdl, adapted=adapted)
        return Normed(open_gates(both, self._gate, pdl=pdl))


class UngatedMLP(_MLP):
    """A block without gates (``FeedForward``): down(activation(up(x))), as Nemotron has it with the
    square of ReLU and StarCoder 2 with GELU."""

    _INTO, _PARTS = "up_proj", ("up_proj",)
    up_proj: MergedColumnLinear

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        group: Group,
        matrices: Matrices,
        activation: Activation,
    ):
        """``name`` is the module's in the checkpoint."""
        super().__init__(
            name,
            hidden_size,
            intermediate_size,
            bias=bias,
            group=group,
            matrices=matrices,
        )
        self._activation = activation
        if activation == "xielu":
            self.act_fn = Xielu()

    def _inner(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None) -> Normed:
        ups = self.up_proj(x, pdl=pdl, adapted=adapted)
        if self._activation == "xielu":
            return Normed(xielu(ups, self.act_fn.numbers, pdl=pdl))
        return Normed(activate(ups, self._activation, pdl=pdl))


class Xielu(nn.Module):
    """The learned ``numbers`` of a layer's xIELU, as ``kernels.activation.xielu`` takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = empty_parameter(4)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        numbers = self.numbers.data
        yield "alpha_p", WeightPlace(numbers[:1], (1,))
        yield "alpha_n", WeightPlace(numbers[1:2], (1,))
        yield "beta", WeightPlace(numbers[2], ())
        yield "eps", WeightPlace(numbers[3], ())
