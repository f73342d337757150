"""Launches ``experts.cu``: the grouped GEMMs of experts on the tensor cores of Hopper, for
``expert_layers``.

Kernels are for one shape of weights. Must not know routers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from minisgl_backend.gates import ExpertsGate
from minisgl_backend.kernels.cuda.experts_many import rounded_rows
from minisgl_backend.kernels.cuda.gates import gate_arguments, gate_macros
from minisgl_backend.kernels.cuda.module import CudaKernel, CudaModule, TensorMap, address
from minisgl_backend.kernels.cuda.weight_maps import WeightMaps
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.expert_cut import ExpertCut
from minisgl_backend.kernels.linear_cut import CODES_BLOCK, PLAIN
from minisgl_backend.kernels.packed_weight import (
    CodesKind,
    PackedWeight,
    code_macros,
    numbers_and_scales,
)


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
        ("row_scales", ctypes.c_void_p),
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
    U, and the result is gate(x G^T) * (x U^T). If it ``squares_relu``, it is relu(x W^T)^2."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        codes: CodesKind | None,
        gate: ExpertsGate | None,
        squares_relu: bool = False,
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
                **gate_macros(gate, squares_relu=squares_relu),
                "SHARED_BYTES": shared,
                "PER_PROCESSOR": cut.per_processor,
                "FLOAT8": cut.rounded,
                **code_macros(codes),
            }
            return CudaModule("experts.cu", constants, device).kernel(
                "experts", shared_bytes=shared
            )

        with ThreadPoolExecutor() as pool:
            kernels = pool.map(compiled, cuts)
        self._kernels = dict(zip(cuts, kernels, strict=True))
        self._num_processors = num_processors(device)
        self._maps = WeightMaps(gated=gate is not None)

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
        numbers, scales, row_scales = numbers_and_scales(weight, self._codes)
        assert x.is_contiguous() and (bias is None or bias.is_contiguous())
        if cut.rounded:
            x, factors = rounded_rows(x, factors, pdl=pdl)
        arguments = _Arguments(
            weight=self._maps(numbers, self._numbers.block_bytes // numbers.itemsize, cut.features),
            x=address(x),
            out=address(out),
            pairs=address(pairs),
            experts=address(experts),
            factors=address(factors),
            scales=address(scales),
            row_scales=address(row_scales),
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
