"""Launches ``routing.cu``: which experts a token takes, and (token, expert) pairs by expert.

It begins with a router's logits or, for few tokens, with the hidden states, which the same kernel
then multiplies by the router's weight. Launches share memory, so they must all be on one stream.
Must not know what experts compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.kernels.cuda.empty_words import empty_words
from minisgl_backend.kernels.cuda.module import CudaKernel, CudaModule, address
from minisgl_backend.kernels.routing import NO_EXTRAS, Alignment, Choices, RouterExtras

MOST_TOKENS: Final = 8
"""``FEW`` of the source: the most tokens for which a router's GEMM is computed; also the tokens of
a thread block in decode steps."""
_OF_PROMPTS: Final = 128
"""The smallest blocks that are made for prompts: pairs are counted while experts are chosen, and a
second kernel puts them into blocks."""
_THREADS: Final = 1024
_ROUTER_STEP: Final = 8
"""in_features that a lane of ``router`` takes at a time."""
_SORTED_BY_ROUTER: Final = 256
"""The most experts for which ``router`` can sort."""


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("shared_gate", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("expert_factors", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("square_tiles", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("first", ctypes.c_int),
        ("held", ctypes.c_int),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """``choices``; their pairs sorted by expert, if asked for; and float32 factors [num_tokens] of
    what experts read, which complete the norm, if it was half done, and have the weight of a
    token's only expert, if weights scale inputs."""

    choices: Choices
    alignment: Alignment | None
    factors: Tensor | None


class RoutingKernel:
    """Top-k of a router's logits, and the pairs sorted by expert."""

    def __init__(
        self,
        rule: RoutingRule,
        held: tuple[int, int],
        hidden_size: int,
        device: torch.device,
        *,
        wide: bool,
        blocks: Sequence[int],
        few: Sequence[int] = (0,),
        shared: bool = False,
        scales_inputs: bool = False,
    ) -> None:
        """``held``: this rank's first expert, and the end of its experts. ``wide``: logits are
        float32, otherwise bfloat16. ``blocks``: the block sizes that calls may ask for, 0 for no
        sorting; ``few``: those that calls of ``of_rows`` may ask for. ``shared``: the weights have
        one more expert, which all tokens may get in addition if there is no sorting.
        ``scales_inputs``: see ``ExpertsSpec``; the weights of choices are then 1."""
        constants = {
            "EXPERTS": rule.num_experts,
            "TOP_K": rule.top_k,
            "SIGMOID": rule.sigmoid,
            "NORMALIZE": rule.normalize,
            "SIZE": hidden_size,
            "WIDE": wide,
            "CORRECTED": rule.corrected,
            "SCALED": rule.scaled,
            "SCALES_INPUTS": scales_inputs,
            "SHARED": False,
            "GROUPS": rule.num_groups if rule.limits_groups else 1,
            "TOP_GROUPS": rule.top_groups if rule.limits_groups else 1,
            "BEST_OF_GROUP": rule.best_of_group,
        }
        self._rule, self._held, self.top_k = rule, held, rule.top_k
        self._scales_inputs = scales_inputs

        def compiled(block: int) -> tuple[CudaKernel, CudaKernel | None]:
            module = CudaModule("routing.cu", {**constants, "BLOCK": block}, device)
            of_prompts = block >= _OF_PROMPTS
            place = module.kernel("place", shared_bytes=0) if of_prompts else None
            return module.kernel("routing", shared_bytes=0), place

        with ThreadPoolExecutor() as pool:
            self._kernels = dict(zip(blocks, pool.map(compiled, blocks), strict=True))
        # by the size of blocks, and whether all tokens take the last expert
        self._routers: dict[tuple[int, bool], CudaKernel] = {}
        if hidden_size % _ROUTER_STEP:
            few = ()
        elif rule.num_experts > _SORTED_BY_ROUTER:
            few = [block for block in few if not block]
        kinds = [(block, False) for block in few]
        if shared and (0, False) in kinds:
            kinds.append((0, True))
        for block, all_take in kinds:
            of_rows = {**constants, "WIDE": True, "BLOCK": block, "SHARED": all_take}
            module = CudaModule("routing.cu", of_rows, device)
            self._routers[block, all_take] = module.kernel("router", shared_bytes=0)
        self._done = torch.zeros(1, dtype=torch.int32, device=device)
        # pairs of each expert, zero between launches, and its next place
        self._counts, self._places = torch.zeros(
            2, rule.num_experts, dtype=torch.int32, device=device
        )
        self._logits = empty_words((MOST_TOKENS, rule.num_experts + 1), device)

    def __call__(
        self,
        logits: Tensor,
        extras: RouterExtras = NO_EXTRAS,
        *,
        block: int,
        squares: Tensor | None = None,
        eps: float = 0.0,
        pdl: bool = False,
    ) -> Routed:
        """``logits`` [num_tokens, num_experts]. With ``squares``, they are of hidden states whose
        norm these complete (``cuda.linear``). The bias in ``extras`` is added only then: otherwise
        logits have theirs. It and the factors are float32."""
        arguments, routed = self._arguments(
            len(logits), self.top_k, logits, extras, block, squares, eps
        )
        if squares is None:
            arguments.bias = None
        kernel, place = self._kernels[block]
        of_block = MOST_TOKENS if place is None else _THREADS // 32
        kernel.launch((-(-len(logits) // of_block), 1, 1), _THREADS, arguments, pdl=pdl)
        if place is not None:
            num_pairs = len(logits) * self.top_k
            place.launch((-(-num_pairs // _THREADS), 1, 1), _THREADS, arguments, pdl=pdl)
        return routed

    def takes_rows(self, num_tokens: int, weight: Tensor, *, block: int) -> bool:
        """Whether a kernel can also compute the router's GEMM with this weight."""
        few = num_tokens <= MOST_TOKENS
        return few and (block, False) in self._routers and weight.dtype == torch.bfloat16

    def of_rows(
        self,
        x: Tensor,
        weight: Tensor,
        extras: RouterExtras = NO_EXTRAS,
        *,
        block: int = 0,
        with_shared: bool = False,
        shared_gate: Tensor | None = None,
        squares: Tensor | None = None,
        eps: float = 0.0,
        pdl: bool = False,
    ) -> Routed:
        """The same for the logits x W^T plus the bias, which are not rounded. ``with_shared``, the
        last expert of the weights is one more choice of each token. Its weight is 1 or, with a
        ``shared_gate`` [hidden_size], sigmoid(x . shared_gate)."""
        assert x.is_contiguous() and weight.is_contiguous()
        assert shared_gate is None or (with_shared and shared_gate.is_contiguous())
        num_choices = self.top_k + with_shared
        arguments, routed = self._arguments(
            len(x), num_choices, self._logits, extras, block, squares, eps
        )
        arguments.x, arguments.router = address(x), address(weight)
        arguments.shared_gate = address(shared_gate)
        num_logits = self._rule.num_experts + with_shared
        grid = -(-num_logits // MOST_TOKENS) + 1, 1, 1
        self._routers[block, with_shared].launch(grid, 32 * MOST_TOKENS, arguments, pdl=pdl)
        return routed

    def _arguments(
        self,
        num_tokens: int,
        num_choices: int,
        logits: Tensor,
        extras: RouterExtras,
        block: int,
        squares: Tensor | None,
        eps: float,
    ) -> tuple[_Arguments, Routed]:
        """The arguments of a launch, and the memory for what it writes. ``num_choices`` are those
        of a token."""
        (first, end), rule, device = self._held, self._rule, logits.device
        assert (extras.factors is not None) == rule.scaled
        assert (extras.correction is not None) == rule.corrected
        assert extras.factors is None or extras.factors.dtype == torch.float32
        num_pairs = num_tokens * rule.top_k
        shape = num_tokens, num_choices
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        weights = torch.empty(shape, dtype=torch.float32, device=device)
        num_blocks = min(num_pairs, -(-num_pairs // block) + end - first) if block else 0
        pairs = torch.empty(num_blocks * block, dtype=torch.int32, device=device)
        experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
        factors = None
        if squares is not None or self._scales_inputs:
            factors = torch.empty(num_tokens, dtype=torch.float32, device=device)
        arguments = _Arguments(
            logits=address(logits),
            bias=address(extras.bias),
            correction=address(extras.correction),
            expert_factors=address(extras.factors),
            squares=address(squares),
            factors=address(factors),
            ids=address(ids),
            weights=address(weights),
            pairs=address(pairs),
            experts=address(experts),
            done=address(self._done),
            counts=address(self._counts),
            places=address(self._places),
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            square_tiles=0 if squares is None else len(squares),
            eps=eps,
            scale=rule.scale,
            first=first,
            held=end - first,
        )
        choices = Choices(ids, weights, elsewhere=end - first < rule.num_experts)
        aligned = Alignment(pairs, experts) if block else None
        return arguments, Routed(choices, aligned, factors)
