"""Launches ``experts.cu`` and ``routing.cu``: a mixture of experts on the tensor cores of Hopper.

Kernels are for one shape of weights. Launches share memory, so they must be in the order of one
stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from cuda.bindings import driver
from torch import Tensor

from minisgl_backend.kernels.cuda.module import CudaKernel, CudaModule, address, checked
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.quantized import QuantizedWeight

_ROW_BYTES: Final = 128
_SHARED_BYTES: Final = 227 * 1024


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """A tile of ``features`` of a weight by ``tokens`` rows of x, and ``stages`` of the ring.

    ``per_processor`` thread blocks share a multiprocessor; ``resident`` of them are launched.
    """

    features: int
    tokens: int
    stages: int
    per_processor: int = 1
    resident: int = 1

    def shared_bytes(self, bits: int) -> int:
        rows = self.features + self.tokens * (16 // bits)
        scales = 0 if bits == 16 else 4 * self.features
        return self.stages * (_ROW_BYTES * rows + scales + 16) + 8 * 48 * (self.features // 16)


class _Map(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Arguments(ctypes.Structure):
    """``Arguments`` of ``experts.cu``."""

    _fields_ = (
        ("weight", _Map),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("num_pairs", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("lines", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("block_outs", ctypes.c_int),
        ("block_ins", ctypes.c_int),
        ("early", ctypes.c_int),
        ("padding", ctypes.c_uint8 * 48),  # to the alignment of the map
    )


class _RoutingArguments(ctypes.Structure):
    """``Arguments`` of ``routing.cu``."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int),
        ("num_blocks", ctypes.c_int),
        ("square_tiles", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class GroupedKernel:
    """x W^T of blocks of rows, each with the W of its expert; or silu(x G^T) * (x U^T) for a
    ``gated`` weight, which holds G and then U."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        bits: int,
        gated: bool,
        cuts: Sequence[ExpertCut],
    ) -> None:
        """``shape``: [num_experts, height, in_features]; ``bits`` of a weight: 16 or 8."""
        _, self._height, self._in_features = shape
        self._gated, self._bits = gated, bits
        self.out_features = self._height // 2 if gated else self._height

        def compiled(cut: ExpertCut) -> CudaKernel:
            shared = cut.shared_bytes(bits)
            constants = {
                "FEATURES": cut.features,
                "TOKENS": cut.tokens,
                "HEIGHT": self._height,
                "SIZE": self._in_features,
                "STAGES": cut.stages,
                "BITS": bits,
                "GATED": gated,
                "SHARED_BYTES": shared,
                "PER_PROCESSOR": cut.per_processor,
            }
            return CudaModule("experts.cu", constants, device).kernel(
                "experts", shared_bytes=shared
            )

        with ThreadPoolExecutor() as pool:
            kernels = pool.map(compiled, cuts)
        self._kernels = {
            cut.tokens: (cut, kernel) for cut, kernel in zip(cuts, kernels, strict=True)
        }
        self._num_processors = num_processors(device)
        self._maps: dict[tuple[int, int], _Map] = {}

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | QuantizedWeight,
        pairs: Tensor,
        experts: Tensor,
        num_pairs: int,
        *,
        block: int,
        top_k: int,
        factors: Tensor | None = None,
        early: bool = False,
        pdl: bool = False,
    ) -> Tensor:
        """[num_pairs, out_features]: row p is x[p // top_k] through the expert of pair p."""
        out = torch.empty((num_pairs, self.out_features), dtype=x.dtype, device=x.device)
        cut, kernel = self._kernels[block]
        numbers = weight.codes if isinstance(weight, QuantizedWeight) else weight
        scales = weight.scales if isinstance(weight, QuantizedWeight) else None
        outs, ins = weight.block if isinstance(weight, QuantizedWeight) else (1, 1)
        arguments = _Arguments(
            weight=self._weight_map(numbers, cut.features),
            x=address(x),
            out=address(out),
            pairs=address(pairs),
            experts=address(experts),
            factors=address(factors),
            scales=address(scales),
            num_pairs=num_pairs,
            num_blocks=len(experts),
            top_k=top_k,
            lines=0 if scales is None else scales.shape[1],
            columns=0 if scales is None else scales.shape[2],
            block_outs=outs,
            block_ins=ins,
            early=early,
        )
        tiles = len(experts) * (self._height // cut.features)
        grid = min(tiles, self._num_processors * cut.resident), 1, 1
        movers = 2 if cut.tokens > 32 else 1
        kernel.launch(grid, 2 * cut.features + 32 * (1 + movers), arguments, pdl=pdl)
        return out

    def _weight_map(self, weight: Tensor, features: int) -> _Map:
        """The tensor map of a weight; cached, since weights do not move while the model lives."""
        key = weight.data_ptr(), features
        if key not in self._maps:
            assert weight.is_contiguous()
            num_experts, height, size = weight.shape
            item, box = weight.itemsize, _ROW_BYTES // weight.itemsize
            if self._gated:
                outs = height // 2
                shape = [size, 8, 2, outs // 8, num_experts]
                strides = [size, outs * size, 8 * size, height * size]
                boxes = [box, 8, 2, features // 16, 1]
            else:
                shape, strides, boxes = [size, num_experts * height], [size], [box, features]
            self._maps[key] = _map(weight, shape, [item * stride for stride in strides], boxes)
        return self._maps[key]


class RoutingKernel:
    """Top-k of a router's logits, and the pairs sorted by expert."""

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        device: torch.device,
        *,
        sigmoid: bool,
        normalize: bool,
        blocks: Sequence[int],
    ) -> None:
        constants = {
            "EXPERTS": num_experts,
            "TOP_K": top_k,
            "SIGMOID": sigmoid,
            "NORMALIZE": normalize,
            "SIZE": hidden_size,
        }
        self._num_experts, self._top_k = num_experts, top_k
        self._kernels = {
            block: CudaModule("routing.cu", {**constants, "BLOCK": block}, device).kernel(
                "routing", shared_bytes=0
            )
            for block in blocks
        }
        self._done = torch.zeros(1, dtype=torch.int32, device=device)

    def __call__(
        self,
        logits: Tensor,
        *,
        block: int,
        bias: Tensor | None = None,
        squares: Tensor | None = None,
        eps: float = 0.0,
        scale: float = 1.0,
        pdl: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        num_tokens, device = len(logits), logits.device
        num_pairs = num_tokens * self._top_k
        ids = torch.empty((num_tokens, self._top_k), dtype=torch.int32, device=device)
        weights = torch.empty((num_tokens, self._top_k), dtype=torch.float32, device=device)
        num_blocks = min(num_pairs, -(-num_pairs // block) + self._num_experts) if block else 0
        pairs = torch.empty(num_blocks * block, dtype=torch.int32, device=device)
        experts = torch.empty(num_blocks, dtype=torch.int32, device=device)
        factors = None
        if squares is not None:
            factors = torch.empty(num_tokens, dtype=torch.float32, device=device)
        arguments = _RoutingArguments(
            logits=address(logits),
            bias=address(bias),
            squares=address(squares),
            factors=address(factors),
            ids=address(ids),
            weights=address(weights),
            pairs=address(pairs),
            experts=address(experts),
            done=address(self._done),
            num_tokens=num_tokens,
            num_blocks=num_blocks,
            square_tiles=0 if squares is None else len(squares),
            eps=eps,
            scale=scale,
        )
        self._kernels[block].launch((-(-num_tokens // 32), 1, 1), 1024, arguments, pdl=pdl)
        return ids, weights, pairs, experts, factors


def _map(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> _Map:
    """The TMA's tensor map: dimensions from the innermost one, strides of the others in bytes."""

    def longs(values: Sequence[int]) -> list[Any]:
        return [driver.cuuint64_t(value) for value in values]

    def ints(values: Sequence[int]) -> list[Any]:
        return [driver.cuuint32_t(value) for value in values]

    types = driver.CUtensorMapDataType
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if tensor.itemsize == 2
            else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            len(shape),
            tensor.data_ptr(),
            longs(shape),
            longs(strides),
            ints(box),
            ints([1] * len(shape)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return _Map((ctypes.c_uint64 * 16)(*(int(word) for word in encoded.opaque)))
