"""A layer of experts on Hopper: routing, gate and up (or up alone), down.

``routing`` chooses the experts. The number of tokens decides which kernels multiply; each way to do
it is a ``_Path``. Kernels are for one shape of weights. Launches share memory, so they must all be
on one stream. Must not know layers' other parts, or how a token's outputs are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.gates import ClampedGate, ExpertsGate
from minisgl_backend.kernels import expert_cut
from minisgl_backend.kernels.cuda.expert_gemv import ExpertGemv
from minisgl_backend.kernels.cuda.experts import GroupedKernel
from minisgl_backend.kernels.cuda.experts_many import ManyRowsKernel
from minisgl_backend.kernels.cuda.routing import MOST_TOKENS, Routed, RoutingKernel
from minisgl_backend.kernels.expert_cut import ExpertCut
from minisgl_backend.kernels.experts import ExpertWeights
from minisgl_backend.kernels.gemv_cut import are_few, expert_gemv_cut
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight
from minisgl_backend.kernels.quantized import QuantizedWeight
from minisgl_backend.kernels.routing import NO_EXTRAS, Choices, RouterExtras


class _Path(Protocol):
    """Both GEMMs of a layer of experts."""

    @property
    def block(self) -> int:
        """The size of the blocks that it needs pairs sorted into; 0 if it needs no sorting."""

    def __call__(
        self, x: Tensor, experts: ExpertWeights, routed: Routed, *, of_all: int | None, pdl: bool
    ) -> Tensor:
        """The outputs, [num_choices, outer_size], for ``x`` [num_tokens, outer_size]. ``of_all``:
        the expert that is each token's last choice, if there is one, for a path without sorting."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A few tokens, each separately (``gemv_cut.are_few``)."""

    up: ExpertGemv
    down: ExpertGemv
    block: int = 0

    def __call__(
        self, x: Tensor, experts: ExpertWeights, routed: Routed, *, of_all: int | None, pdl: bool
    ) -> Tensor:
        gate_up, down = _weight(experts.gate_up), _weight(experts.down)
        ids = routed.choices.ids
        bias, factors = experts.gate_up_bias, routed.factors
        inner = self.up(x, gate_up, ids, factors=factors, bias=bias, of_all=of_all, pdl=pdl)
        bias = experts.down_bias
        return self.down(inner, down, ids, bias=bias, of_all=of_all, early=pdl, pdl=pdl)


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Any number of tokens, by tiles of this ``cut``."""

    up: GroupedKernel
    down: GroupedKernel
    cut: ExpertCut

    @property
    def block(self) -> int:
        return self.cut.tokens

    def __call__(
        self, x: Tensor, experts: ExpertWeights, routed: Routed, *, of_all: int | None, pdl: bool
    ) -> Tensor:
        pairs, top_k = _pairs(routed)
        inner = self.up(
            x,
            _weight(experts.gate_up),
            *pairs,
            cut=self.cut,
            top_k=top_k,
            factors=routed.factors,
            bias=experts.gate_up_bias,
            pdl=pdl,
        )
        return self.down(
            inner,
            _weight(experts.down),
            *pairs,
            cut=self.cut,
            top_k=1,
            bias=experts.down_bias,
            early=pdl,
            pdl=pdl,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _ManyRows:
    """Many rows per expert, by weights without biases."""

    up: ManyRowsKernel
    down: ManyRowsKernel
    block: int = expert_cut.MANY.block

    def __call__(
        self, x: Tensor, experts: ExpertWeights, routed: Routed, *, of_all: int | None, pdl: bool
    ) -> Tensor:
        assert experts.gate_up_bias is None
        (pairs, top_k), gate_up = _pairs(routed), _weight(experts.gate_up)
        inner = self.up(x, gate_up, *pairs, top_k=top_k, factors=routed.factors, pdl=pdl)
        return self.down(inner, _weight(experts.down), *pairs, top_k=1, pdl=pdl)


def _pairs(routed: Routed) -> tuple[tuple[Tensor, Tensor, int], int]:
    """The pairs in blocks, the blocks' experts and the number of pairs; and the pairs per token."""
    ids, aligned = routed.choices.ids, routed.alignment
    assert aligned is not None
    return (aligned.pairs, aligned.experts, ids.numel()), ids.shape[1]


def _weight(of_experts: Tensor | PackedWeight | QuantizedWeight) -> Tensor | PackedWeight:
    assert not isinstance(of_experts, QuantizedWeight)  # codes are packed
    return of_experts


class ExpertsKernels:
    """The kernels for layers whose experts have one shape: routing, gate and up, and down. Without
    a ``gate``, there is only up, and the square of its ReLU."""

    def __init__(
        self,
        rule: RoutingRule,
        held: tuple[int, int],
        gate_up: Sequence[int],
        down: Sequence[int],
        device: torch.device,
        *,
        kinds: tuple[CodesKind, CodesKind] | None,
        gate: ExpertsGate | None,
        hidden_size: int,
        wide: bool,
        shared: bool = False,
        scales_inputs: bool = False,
    ) -> None:
        """``gate_up`` and ``down`` are the shapes of the weights of all experts held, ``kinds``
        their kinds if they are packed. The router reads rows of ``hidden_size``, which experts with
        a latent do not. ``held``, ``wide``, ``shared`` and ``scales_inputs``: see
        ``RoutingKernel``."""
        of_gate_up, of_down = kinds or (None, None)
        self._encoding = None if of_down is None else of_down.encoding
        self._num_experts = rule.num_experts
        bits = 16 if self._encoding is None else self._encoding.bits
        self._bytes_of_expert = (prod(gate_up[1:]) + prod(down[1:])) * bits // 8
        self._rounds = kinds is not None and all(kind.rounds_many_rows for kind in kinds)
        all_cuts = expert_cut.cuts(self._encoding, rounds=self._rounds)
        is_gated = gate is not None
        up = GroupedKernel(
            gate_up, device, codes=of_gate_up, gate=gate, squares_relu=not is_gated, cuts=all_cuts
        )
        outer = GroupedKernel(down, device, codes=of_down, gate=None, cuts=all_cuts)
        self._tiles = {cut: _Tiles(up, outer, cut) for cut in all_cuts}
        self._of_rows = _path_for_rows(gate_up, down, device, kinds=kinds, gate=gate)
        self._of_many: _ManyRows | None = None
        is_multiplied = kinds is None or self._rounds
        # gpt-oss's gate comes with biases, which only some kernels add
        fits_many = is_multiplied and expert_cut.fits_many(*down[1:], gated=is_gated)
        if fits_many and not isinstance(gate, ClampedGate):
            self._of_many = _ManyRows(
                ManyRowsKernel(
                    gate_up, device, codes=of_gate_up, gate=gate, squares_relu=not is_gated
                ),
                ManyRowsKernel(down, device, codes=of_down, gate=None),
            )
        blocks = [0, *(path.block for path in self._tiles.values())]
        if self._of_many is not None:
            blocks.append(self._of_many.block)
        few = {
            self._cut(num_tokens * rule.top_k).tokens for num_tokens in range(1, MOST_TOKENS + 1)
        }
        self._route = RoutingKernel(
            rule,
            held,
            hidden_size,
            device,
            wide=wide,
            blocks=blocks,
            few=[0, *few],
            shared=shared,
            scales_inputs=scales_inputs,
        )

    def _cut(self, num_pairs: int) -> ExpertCut:
        return expert_cut.cut_of(num_pairs, self._num_experts, self._encoding, rounds=self._rounds)

    def _path(self, num_tokens: int) -> _Path:
        """The fastest way to compute this number of tokens."""
        num_pairs = num_tokens * self._route.top_k
        if self._of_rows is not None and are_few(num_tokens, num_pairs, self._encoding):
            return self._of_rows
        are_many = expert_cut.are_many(num_pairs, self._num_experts, self._encoding)
        if are_many and self._of_many is not None:
            return self._of_many
        return self._tiles[self._cut(num_pairs)]

    def takes_shared(self, num_tokens: int, router: Tensor) -> bool:
        """Whether a call may be ``with_shared``, if the kernels are made for ``shared``."""
        is_by_rows = self._path(num_tokens) is self._of_rows
        fits = is_by_rows and self._route.takes_rows(num_tokens, router, block=0)
        return fits and (num_tokens - 1) * self._bytes_of_expert <= expert_cut.MOST_READ_AGAIN

    def __call__(
        self,
        x: Tensor,
        router: Tensor,
        logits: Callable[[bool], Tensor],
        experts: ExpertWeights,
        *,
        extras: RouterExtras = NO_EXTRAS,
        routed: Tensor | None = None,
        with_shared: bool = False,
        shared_gate: Tensor | None = None,
        squares: Tensor | None = None,
        eps: float = 0.0,
        pdl: bool = False,
    ) -> tuple[Tensor, Choices]:
        """The outputs of each token's experts, [num_tokens, top_k, outer_size], and which experts
        these are. Rows of experts that other ranks hold are not written.

        ``x`` [num_tokens, outer_size] is normalized; with ``squares``, its norm is half done
        (``cuda.linear``). The router reads ``routed`` [num_tokens, hidden_size], whose norm is
        complete, or otherwise ``x``. ``router`` is the router's weight; ``extras`` as
        ``RoutingKernel`` takes them. ``logits`` computes its logits, [num_tokens, num_experts], if
        no kernel here does; its argument says whether it adds the bias, which it does only if the
        norm is complete. ``with_shared`` all tokens also take the last expert: it is one more
        choice. Its weight is 1 or, with a ``shared_gate`` [hidden_size], the sigmoid.
        """
        assert routed is None or (squares is None and not with_shared)
        path, route = self._path(len(x)), self._route
        block = path.block
        if route.takes_rows(len(x), router, block=block):
            found = route.of_rows(
                x if routed is None else routed,
                router,
                extras,
                block=block,
                with_shared=with_shared,
                shared_gate=shared_gate,
                squares=squares,
                eps=eps,
                pdl=pdl,
            )
        else:
            assert not with_shared
            of_router = logits(squares is None)
            found = route(of_router, extras, block=block, squares=squares, eps=eps, pdl=pdl)
        of_all = experts.num_experts - 1 if with_shared else None
        outer = path(x, experts, found, of_all=of_all, pdl=pdl)
        return outer.view(*found.choices.ids.shape, -1), found.choices


def _path_for_rows(
    gate_up: Sequence[int],
    down: Sequence[int],
    device: torch.device,
    *,
    kinds: tuple[CodesKind, CodesKind] | None,
    gate: ExpertsGate | None,
) -> _Rows | None:
    """The path for a few tokens, if there are kernels for weights of these shapes and kinds."""
    of_up, of_down = kinds or (None, None)
    first, second = expert_gemv_cut(gate_up[2], of_up), expert_gemv_cut(down[2], of_down)
    if first is None or second is None:
        return None
    return _Rows(
        ExpertGemv(gate_up, device, codes=of_up, gate=gate, squares_relu=gate is None, cut=first),
        ExpertGemv(down, device, codes=of_down, gate=None, cut=second),
    )


class HopperExperts:
    """Makes the kernels of a model's experts: ``kernels`` makes ``ExpertsKernels``. Layers of the
    same shape share kernels and their memory."""

    def __init__(self, device: torch.device) -> None:
        self.kernels = cache(partial(ExpertsKernels, device=device))
