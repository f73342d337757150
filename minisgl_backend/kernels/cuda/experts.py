"""Launches ``experts.cu``: a mixture of experts on the tensor cores of Hopper.

``routing`` chooses the experts. ``GroupedKernel`` launches the grouped GEMMs, except that
``experts_many`` does if experts have many rows each, and ``expert_gemv`` for a few tokens and some
kinds of weights.

Kernels are for one shape of weights. Launches share memory, so they must all be on one stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.gates import ClampedGate, Gate
from minisgl_backend.kernels import expert_cut
from minisgl_backend.kernels.cuda.expert_gemv import ExpertGemv
from minisgl_backend.kernels.cuda.experts_many import ManyRowsKernel, experts_map, rounded_rows
from minisgl_backend.kernels.cuda.gates import gate_arguments, gate_macro
from minisgl_backend.kernels.cuda.module import CudaKernel, CudaModule, TensorMap, address
from minisgl_backend.kernels.cuda.routing import MOST_TOKENS, RoutingKernel
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.expert_cut import ExpertCut
from minisgl_backend.kernels.experts import ExpertWeights
from minisgl_backend.kernels.gemv_cut import MOST_CHOICES, expert_gemv_cut
from minisgl_backend.kernels.linear_cut import CODES_BLOCK, PLAIN
from minisgl_backend.kernels.packed_weight import PLAIN_MACROS, CodesKind, PackedWeight
from minisgl_backend.kernels.quantized import QuantizedWeight
from minisgl_backend.kernels.routing import Choices
from minisgl_backend.kernels.triton_kernels.expert_rows import launch_expert_rows


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("weight", TensorMap),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("early", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("padding", ctypes.c_uint8 * 48),  # to the alignment of the map
    )


class GroupedKernel:
    """x W^T for blocks of rows, each with the W of its expert. With a ``gate`` it holds G and then
    U, and the result is gate(x G^T) * (x U^T)."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        codes: CodesKind | None,
        gate: Gate | ClampedGate | None,
        cuts: Sequence[ExpertCut],
    ) -> None:
        """``shape``: [num_experts, height, in_features]; ``codes``: the kind of packed weights."""
        _, self._height, self._in_features = shape
        self._gate, self._codes = gate, codes
        self._numbers = PLAIN if codes is None else codes.numbers(2 * CODES_BLOCK)
        self.out_features = self._height if gate is None else self._height // 2

        def compiled(cut: ExpertCut) -> CudaKernel:
            assert not cut.rounded or (codes is not None and codes.rounds_many_rows)
            cut = cut.fitted(self._numbers)
            shared = cut.shared_bytes(self._numbers)
            constants = {
                "FEATURES": cut.features,
                "TOKENS": cut.tokens,
                "HEIGHT": self._height,
                "SIZE": self._in_features,
                "BLOCK": self._numbers.block,
                "STAGES": cut.stages,
                "BY_WARP": cut.by_warp,
                "WAYS": 1,
                "GATED": gate is not None,
                "GATE": gate_macro(gate),
                "SHARED_BYTES": shared,
                "PER_PROCESSOR": cut.per_processor,
                "FLOAT8": cut.rounded,
                **(PLAIN_MACROS if codes is None else codes.macros),
            }
            return CudaModule("experts.cu", constants, device).kernel(
                "experts", shared_bytes=shared
            )

        with ThreadPoolExecutor() as pool:
            kernels = pool.map(compiled, cuts)
        self._kernels = dict(zip(cuts, kernels, strict=True))
        self._num_processors = num_processors(device)
        self._maps: dict[tuple[int, int], TensorMap] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        pairs: Tensor,
        experts: Tensor,
        num_pairs: int,
        *,
        cut: ExpertCut,
        top_k: int,
        factors: Tensor | None = None,
        bias: Tensor | None = None,
        early: bool = False,
        pdl: bool = False,
    ) -> Tensor:
        """[num_pairs, out_features]: row p is x[p // top_k] through the expert of pair p. ``pairs``
        and ``experts`` list the pairs in blocks of ``cut.tokens`` (``kernels.routing.Alignment``).

        The rows of x are multiplied by ``factors`` [num_pairs / top_k]. ``bias`` [num_experts,
        height] is added before a gate. ``early``: of these, the kernel before this one wrote only
        x.
        """
        out = torch.empty((num_pairs, self.out_features), dtype=x.dtype, device=x.device)
        kernel = self._kernels[cut]
        scales = None
        if isinstance(weight, PackedWeight):
            assert weight.kind == self._codes
            scales, numbers = weight.scales, weight.weight.codes
        else:
            numbers = weight
        assert x.is_contiguous() and (bias is None or bias.is_contiguous())
        if cut.rounded:
            x, factors = rounded_rows(x, factors, pdl=pdl)
        arguments = _Arguments(
            weight=self._weight_map(numbers, cut.features),
            x=address(x),
            out=address(out),
            pairs=address(pairs),
            experts=address(experts),
            factors=address(factors),
            scales=address(scales),
            bias=address(bias),
            num_pairs=num_pairs,
            num_blocks=len(experts),
            top_k=top_k,
            early=early,
            **gate_arguments(self._gate),
        )
        tiles = len(experts) * -(-self._height // cut.features)
        grid = min(tiles, self._num_processors * cut.resident), 1, 1
        movers = 2 if cut.tokens > 32 else 1
        kernel.launch(grid, 2 * cut.features + 32 * (1 + movers), arguments, pdl=pdl)
        return out

    def _weight_map(self, weight: Tensor, features: int) -> TensorMap:
        """The tensor map of a weight; cached, since weights do not move while the model lives."""
        key = weight.data_ptr(), features
        if key not in self._maps:
            codes = weight.view(torch.uint8) if self._codes is not None else weight
            width = self._numbers.block * self._numbers.bits // 8 // codes.itemsize
            self._maps[key] = experts_map(codes, (width, features), gated=self._gate is not None)
        return self._maps[key]


class ExpertsKernels:
    """The kernels for layers whose experts have one shape: routing, gate and up, and down."""

    def __init__(
        self,
        rule: RoutingRule,
        held: tuple[int, int],
        gate_up: Sequence[int],
        down: Sequence[int],
        device: torch.device,
        *,
        kinds: tuple[CodesKind, CodesKind] | None,
        gate: Gate | ClampedGate,
        wide: bool,
        shared: bool = False,
    ) -> None:
        """``gate_up`` and ``down`` are the shapes of the weights of all experts held, ``kinds``
        their kinds if they are packed. ``held``, ``wide`` and ``shared``: see ``RoutingKernel``."""
        of_gate_up, of_down = kinds or (None, None)
        self._encoding = None if of_down is None else of_down.encoding
        self._num_experts = rule.num_experts
        self._rounds = kinds is not None and all(kind.rounds_many_rows for kind in kinds)
        all_cuts = expert_cut.cuts(self._encoding, rounds=self._rounds)
        is_multiplied = kinds is None or self._rounds
        # gpt-oss's gate comes with biases, which only some kernels add
        is_biased = isinstance(gate, ClampedGate)
        has_many = not is_biased and is_multiplied and expert_cut.fits_many(*down[1:])
        blocks = [0, *(cut.tokens for cut in all_cuts)]
        if has_many:
            blocks.append(expert_cut.MANY.block)
        few = {
            self._cut(num_tokens * rule.top_k).tokens for num_tokens in range(1, MOST_TOKENS + 1)
        }
        self._route = RoutingKernel(
            rule, held, gate_up[2], device, wide=wide, blocks=blocks, few=[0, *few], shared=shared
        )
        self._gate_up = GroupedKernel(gate_up, device, codes=of_gate_up, gate=gate, cuts=all_cuts)
        self._down = GroupedKernel(down, device, codes=of_down, gate=None, cuts=all_cuts)
        self._for_few: tuple[ExpertGemv, ExpertGemv] | None = None
        if kinds is not None:
            first, second = (
                expert_gemv_cut(of[2], kind)
                for of, kind in zip((gate_up, down), kinds, strict=True)
            )
            if first and second:
                self._for_few = (
                    ExpertGemv(gate_up, device, codes=kinds[0], gate=gate, cut=first),
                    ExpertGemv(down, device, codes=kinds[1], gate=None, cut=second),
                )
        self._up_for_rows: ExpertGemv | None = None
        cut = None if kinds is not None or is_biased else expert_gemv_cut(gate_up[2], None)
        if cut is not None:
            self._up_for_rows = ExpertGemv(gate_up, device, codes=None, gate=gate, cut=cut)
        self._for_many: tuple[ManyRowsKernel, ManyRowsKernel] | None = None
        if has_many:
            assert not isinstance(gate, ClampedGate)
            self._for_many = (
                ManyRowsKernel(gate_up, device, codes=of_gate_up, gate=gate),
                ManyRowsKernel(down, device, codes=of_down, gate=None),
            )

    def _cut(self, num_pairs: int) -> ExpertCut:
        return expert_cut.cut_of(num_pairs, self._num_experts, self._encoding, rounds=self._rounds)

    def takes_shared(self, num_tokens: int, router: Tensor) -> bool:
        """Whether a call may be ``with_shared``, if the kernels are made for ``shared``."""
        is_few = (
            num_tokens <= expert_cut.MOST_ROWS
            if self._up_for_rows is not None
            else num_tokens * self._route.top_k <= MOST_CHOICES and self._for_few is not None
        )
        return is_few and self._route.takes_rows(num_tokens, router, block=0)

    def __call__(
        self,
        x: Tensor,
        router: Tensor,
        logits: Callable[[bool], Tensor],
        experts: ExpertWeights,
        *,
        routed: Tensor | None = None,
        with_shared: bool = False,
        shared_gate: Tensor | None = None,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
        expert_factors: Tensor | None = None,
        squares: Tensor | None = None,
        eps: float = 0.0,
        pdl: bool = False,
    ) -> tuple[Tensor, Choices]:
        """The outputs of each token's experts, [num_tokens, top_k, hidden_size], and which experts
        these are. Rows of experts that other ranks hold are not written.

        ``x`` [num_tokens, hidden_size] is normalized; with ``squares``, its norm is half done
        (``cuda.linear``). The router reads ``routed``, of the same shape, or otherwise ``x``; its
        norm is complete. ``router`` is the router's weight; ``bias``, float32 [num_experts], is
        added to its logits. ``logits`` computes these, [num_tokens, num_experts], if no kernel here
        does; its argument says whether it adds the bias, which it does only if the norm is
        complete. ``correction`` and ``expert_factors``: see ``RoutingKernel``. ``with_shared`` all
        tokens also take the last expert: it is one more choice. Its weight is 1 or, with a
        ``shared_gate`` [hidden_size], the sigmoid.
        """
        assert routed is None or (squares is None and not with_shared)
        num_tokens, top_k = len(x), self._route.top_k
        num_pairs = num_tokens * top_k
        gate_up, down = experts.gate_up, experts.down
        assert not isinstance(gate_up, QuantizedWeight) and not isinstance(down, QuantizedWeight)
        is_unbiased = experts.gate_up_bias is None
        are_many = is_unbiased and expert_cut.are_many(num_pairs, self._num_experts, self._encoding)
        for_many = self._for_many if are_many else None
        is_few = num_tokens <= expert_cut.MOST_ROWS and is_unbiased
        up_for_rows = self._up_for_rows if is_few else None
        cut = self._cut(num_pairs)
        rest: dict[str, Any] = {
            "correction": correction,
            "expert_factors": expert_factors,
            "squares": squares,
            "eps": eps,
            "pdl": pdl,
        }
        for_few = self._for_few if num_pairs <= MOST_CHOICES else None
        of_all = gate_up.shape[0] - 1 if with_shared else None
        block = 0 if up_for_rows or for_few else expert_cut.MANY.block if for_many else cut.tokens
        if self._route.takes_rows(num_tokens, router, block=block):
            rest["bias"] = bias
            rows = x if routed is None else routed
            found = self._route.of_rows(
                rows, router, block=block, with_shared=with_shared, shared_gate=shared_gate, **rest
            )
        else:
            assert not with_shared
            rest["bias"] = None if squares is None else bias
            found = self._route(logits(squares is None), block=block, **rest)
        if up_for_rows:
            assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
            ids = found.choices.ids
            inner = up_for_rows(x, gate_up, ids, factors=found.factors, of_all=of_all, pdl=pdl)
            outer = x.new_empty((ids.numel(), down.shape[1]))
            launch_expert_rows(outer, inner, down, ids.flatten(), early=pdl, pdl=pdl)
        elif for_few:
            assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
            ids, (few_up, few_down) = found.choices.ids, for_few
            of_up, of_down = experts.gate_up_bias, experts.down_bias
            inner = few_up(
                x, gate_up, ids, factors=found.factors, bias=of_up, of_all=of_all, pdl=pdl
            )
            outer = few_down(inner, down, ids, bias=of_down, of_all=of_all, early=pdl, pdl=pdl)
        elif for_many:
            aligned = found.alignment
            assert aligned is not None
            held, (up, of_inner) = (aligned.pairs, aligned.experts, num_pairs), for_many
            inner = up(x, gate_up, *held, top_k=top_k, factors=found.factors, pdl=pdl)
            outer = of_inner(inner, down, *held, top_k=1, pdl=pdl)
        else:
            aligned = found.alignment
            assert aligned is not None
            inner = self._gate_up(
                x,
                gate_up,
                aligned.pairs,
                aligned.experts,
                num_pairs,
                cut=cut,
                top_k=top_k,
                factors=found.factors,
                bias=experts.gate_up_bias,
                pdl=pdl,
            )
            outer = self._down(
                inner,
                down,
                aligned.pairs,
                aligned.experts,
                num_pairs,
                cut=cut,
                top_k=1,
                bias=experts.down_bias,
                early=pdl,
                pdl=pdl,
            )
        return outer.view(*found.choices.ids.shape, -1), found.choices


class HopperExperts:
    """Makes the kernels of a model's experts: ``kernels`` makes ``ExpertsKernels``. Layers of the
    same shape share kernels and their memory."""

    def __init__(self, device: torch.device) -> None:
        self.kernels = cache(partial(ExpertsKernels, device=device))
