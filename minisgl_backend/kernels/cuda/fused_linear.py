"""Compiles and launches ``linear.cu``: the base class of the kernels of ``linear``.

Each row of x W^T is multiplied by a factor, that of RMSNorm or 1, and a bias is added. Subclasses
say what is done with the result. With an ``adaptation``, LoRA adapters add to the product
(``kernels.adapters``). x A^T is computed by the kernel of ``cuda.adapters`` right before the GEMM,
or by the GEMM itself, which then treats the A of all adapters like more rows of the weight.

One row times some weights is left to the kernel of ``cuda.gemv``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.kernels.adapters import Adaptation, AdaptersShape
from minisgl_backend.kernels.cuda.adapters import shrink_kernel
from minisgl_backend.kernels.cuda.gemv import Gemv
from minisgl_backend.kernels.cuda.heads import Heads
from minisgl_backend.kernels.cuda.module import (
    CudaKernel,
    CudaModule,
    TensorMap,
    address,
    tensor_map,
)
from minisgl_backend.kernels.dispatch import num_processors, shared_bytes
from minisgl_backend.kernels.gemv_cut import gemv_cut
from minisgl_backend.kernels.linear_cut import BATCHES, BLOCK, FEW_TOKENS, PLAIN, Cut, cut_of
from minisgl_backend.kernels.packed_weight import PLAIN_MACROS, CodesKind, PackedWeight
from minisgl_backend.kernels.shared_memory import most_bytes

_TWO_OF_CODES: Final = 1024
"""Up to this many sums over all ways, two thread blocks that convert codes get registers."""
_MOST_JOINED: Final = 16
"""GEMMs of up to this many tokens compute x A^T themselves, if all their thread blocks run at the
same time."""
_MOST_TILES_OF_A: Final = 32


class _Adapters(ctypes.Structure):
    """``Adapters`` of the source."""

    _fields_ = (
        ("inner", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("slot_stride", ctypes.c_uint64),
        ("columns", ctypes.c_int),
        ("max_rank", ctypes.c_int),
        ("second", ctypes.c_int),
        ("third", ctypes.c_int),
        ("tiles_of_a", ctypes.c_int),
        ("pairs", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
    )


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("weight", TensorMap),
        ("x", TensorMap),
        ("a", TensorMap),
        ("out", ctypes.c_void_p),
        ("scaled", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("squares_out", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("are_there", ctypes.c_void_p),
        ("tiles", ctypes.c_int),
        ("square_tiles", ctypes.c_int),
        ("num_rows", ctypes.c_int),
        ("features", ctypes.c_int),
        ("eps", ctypes.c_float),
        ("heads", Heads),
        ("scales", ctypes.c_void_p),
        ("adapters", _Adapters),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """What a GEMM that computes x A^T itself has besides its weight: ``tiles`` of A, and memory for
    x A^T (``Adapters`` of the source)."""

    tiles: int
    pairs: Tensor
    launches: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _CutKernel:
    cut: Cut
    kernel: CudaKernel
    joined: _Joined | None = None


class FusedLinear:
    """The kernels for weights of one ``shape``, [height, in_features], and up to ``most_tokens``
    rows.

    Launches share memory, so they must all be on one stream.
    """

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        most_tokens: int,
        cuts: Mapping[int, Cut] | None,
        head_dim: int | None = None,
        pairs: int | None = None,
        codes: CodesKind | None = None,
        adapters: AdaptersShape | None = None,
        **kind: int,
    ) -> None:
        """``cuts`` are keyed by the largest batch that each is for. By default they are those of
        ``cut_of``, besides the kernel of ``cuda.gemv`` if it is faster for one row. ``head_dim``: a
        tile is a head. ``pairs``: the distance between a gate's row of the weight and the row that
        it opens. ``codes``: the kind of packed weights. ``adapters``: launches may have an
        adaptation of this shape, for which there are separate kernels. ``kind`` are the macros of
        ``linear.cu`` that say what is done with the results.
        """
        height, in_features = shape
        self.most_tokens = most_tokens
        self._height, self._in_features = height, in_features
        self._pairs, self._codes = pairs, codes
        self._gemv: Gemv | None = None
        if cuts is None:
            macros = {**_OF_RESULTS, **kind, "HEADS": head_dim or 0}
            self._gemv = _gemv(
                (height, in_features), device, codes=codes, macros=macros, adapters=adapters
            )
        numbers = PLAIN if codes is None else codes.numbers(in_features)
        batches = [batch for batch in BATCHES if batch <= most_tokens]
        gated = bool(kind.get("GATED"))
        of = partial(cut_of, head_dim=head_dim, numbers=numbers, gated=gated)
        cuts_of: dict[bool, Mapping[int, Cut]] = {}
        for adapted in (False,) if adapters is None else (False, True):
            cuts_of[adapted] = cuts or {
                # joined, thread blocks wait for those that compute x A^T, so all must run at the
                # same time; more of them have not made larger batches faster
                batch: of(batch, height, in_features, shared=not adapted)
                for batch in batches
            }
        self._num_processors = num_processors(device)
        self._device = device

        joined: dict[int, _Joined | None] = {}
        if adapters is not None:
            joined = {
                batch: self._join(batch, cut, adapters) for batch, cut in cuts_of[True].items()
            }

        def compiled(what: tuple[Cut, _Joined | None], *, adapted: bool) -> _CutKernel:
            cut, of_a = what
            macros = {**_OF_RESULTS, **_macros(codes), **kind}
            constants = {"SIZE": in_features, **macros, "ADAPTED": adapted}
            constants["WHOLE"] = height % cut.features == 0
            constants["JOINED"] = of_a is not None
            constants["PUSHED"] = cut.pushed_bytes > 0
            return _CutKernel(cut, _kernel(cut, constants, device), of_a)

        self._kernels: dict[bool, dict[int, _CutKernel]] = {}
        with ThreadPoolExecutor() as pool:
            for adapted, own in cuts_of.items():
                wanted = {
                    batch: (cut, joined[batch] if adapted else None) for batch, cut in own.items()
                }
                different = list(dict.fromkeys(wanted.values()))
                make = partial(compiled, adapted=adapted)
                kernels = dict(zip(different, pool.map(make, different), strict=True))
                self._kernels[adapted] = {batch: kernels[of] for batch, of in wanted.items()}
        self._adapters = adapters
        self._shrink = None if adapters is None else shrink_kernel(device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)
        even = [cut for cut in cuts_of[False].values() if cut.even]
        # a thread block without a step would write no partial result, and another would wait for it
        assert all(cut.num_steps(height, in_features) >= self._num_processors for cut in even)
        elements = max((cut.features * cut.tokens for cut in even), default=0)
        self._parts = torch.empty((self._num_processors, elements), device=device)
        self._are_there = torch.zeros(self._num_processors, dtype=torch.int32, device=device)
        self._maps: dict[tuple[int, int, int], TensorMap] = {}
        self._maps_of_a: dict[tuple[int, int], TensorMap] = {}

    def _join(self, batch: int, cut: Cut, adapters: AdaptersShape) -> _Joined | None:
        """Not None if GEMMs of up to ``batch`` rows compute x A^T themselves."""
        num_slots, columns = adapters
        if self._codes is not None or batch > min(cut.tokens, _MOST_JOINED):
            return None
        tiles = -(-num_slots * columns // cut.features)
        of_tiles = (tiles + cut.num_tiles(self._height)) * cut.splits
        blocks = self._num_processors if cut.even else of_tiles
        if blocks > self._num_processors or tiles > _MOST_TILES_OF_A:
            return None
        # zeros from the start, so not in the memory of a graph
        pairs = torch.zeros((cut.tokens, columns), dtype=torch.int32, device=self._device)
        launches = torch.zeros(blocks, dtype=torch.int32, device=self._device)
        return _Joined(tiles, pairs, launches)

    def _kernel_for(self, num_rows: int, *, adapted: bool) -> _CutKernel:
        kernels = self._kernels[adapted]
        return kernels[min(batch for batch in kernels if num_rows <= batch)]

    def _gemv_for(self, num_rows: int, *, adapted: bool) -> Gemv | None:
        """The kernel for one row, if there is one; for plain weights it takes no adapters."""
        return None if num_rows > 1 or (adapted and self._codes is None) else self._gemv

    def _num_tiles(self, num_rows: int, *, adapted: bool) -> int:
        """The weight's tiles, which is also the number of sums of squares left for each row."""
        gemv = self._gemv_for(num_rows, adapted=adapted)
        if gemv is not None:
            return gemv.tiles
        return self._kernel_for(num_rows, adapted=adapted).cut.num_tiles(self._height)

    def _launch(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        pdl: bool,
        *,
        bias: Tensor | None,
        adaptation: Adaptation | None,
        squares: Tensor | None = None,
        **values: Any,
    ) -> None:
        num_rows, in_order = len(x), x
        scales = None
        if isinstance(weight, PackedWeight):
            assert weight.kind == self._codes
            x, scales = weight.ordered(x), weight.scales
            weight = weight.weight.codes
        gemv = self._gemv_for(num_rows, adapted=adaptation is not None)
        if gemv is not None:
            gemv(
                x,
                weight,
                scales,
                squares=squares,
                bias=bias,
                adaptation=adaptation,
                x_of_a=in_order,
                pdl=pdl,
                **values,
            )
            return
        assert x.stride(1) == 1 and weight.is_contiguous() and num_rows <= max(self._kernels[False])
        of_cut = self._kernel_for(num_rows, adapted=adaptation is not None)
        cut, joined = of_cut.cut, of_cut.joined
        tiles = cut.num_tiles(self._height)
        token_tiles = -(-num_rows // cut.tokens)
        # thread blocks with even parts wait for each other, so all must run at the same time
        blocks = self._num_processors // token_tiles if cut.even else tiles
        if adaptation is not None:
            memory = adaptation.memory
            assert self._shrink is not None and memory.a.shape[:2] == self._adapters
            values["adapters"] = _adapters(adaptation)
            if joined is None:
                inner = self._shrink(in_order, adaptation, turns=self._turns, pdl=pdl)
                values["adapters"].inner = address(inner)
                values["adapters"].turns = address(self._turns)
            else:
                if not cut.even:
                    blocks += joined.tiles
                values["adapters"].tiles_of_a = joined.tiles
                values["adapters"].pairs = address(joined.pairs)
                values["adapters"].launches = address(joined.launches)
                values["a"] = self._map_of_a(memory.a, cut.features)
        grid = token_tiles, blocks, cut.splits
        arguments = _Arguments(
            weight=self._weight_map(weight, cut.features, cut.numbers.block),
            scales=address(scales),
            x=tensor_map(x, (x.shape[1], num_rows), (x.stride(0),), (BLOCK, cut.tokens)),
            squares=address(squares),
            square_tiles=0 if squares is None else len(squares),
            num_rows=num_rows,
            bias=address(bias),
            parts=address(self._parts),
            are_there=address(self._are_there),
            tiles=tiles,
            **values,
        )
        cluster = 1, 1, cut.splits
        of_cut.kernel.launch(grid, cut.threads, arguments, cluster=cluster, pdl=pdl)

    def _map_of_a(self, a: Tensor, features: int) -> TensorMap:
        """The tensor map of the A of all adapters; cached like those of weights."""
        key = a.data_ptr(), features
        if key not in self._maps_of_a:
            assert a.is_contiguous()
            num_slots, columns, size = a.shape
            shape = size, num_slots * columns
            self._maps_of_a[key] = tensor_map(a, shape, (size,), (BLOCK, features))
        return self._maps_of_a[key]

    def _weight_map(self, weight: Tensor, features: int, block: int) -> TensorMap:
        """The tensor map of a weight, or of its codes in bytes; cached, since weights do not move
        while the model lives."""
        key = weight.data_ptr(), features, block
        if key not in self._maps:
            size, pairs = weight.shape[1], self._pairs  # of codes in bytes
            width = block
            if self._codes is not None:
                width = width * self._codes.encoding.bits // 8
            if pairs is None:
                made = tensor_map(weight, (size, self._height), (size,), (width, features))
            else:
                shape, strides = (size, 8, 2, pairs // 8), (size, pairs * size, 8 * size)
                made = tensor_map(weight, shape, strides, (width, 8, 2, features // 16))
            self._maps[key] = made
        return self._maps[key]


def _adapters(adaptation: Adaptation) -> _Adapters:
    """What every kernel is told about the adapters."""
    b, tokens = adaptation.memory.b, adaptation.tokens
    assert b.is_contiguous()
    second, third = adaptation.memory.later_projections
    return _Adapters(
        b=address(b),
        slots=address(tokens.slots),
        ranks=address(tokens.ranks),
        slot_stride=b.stride(0),
        columns=adaptation.memory.a.shape[1],
        max_rank=b.shape[2],
        second=second,
        third=third,
    )


_OF_RESULTS: Final = {"GATED": 0, "GATE": 0, "RESIDUAL": 0, "HEADS": 0, "FP8": 0, "PAGE_SIZE": 1}
"""The macros that say what is done with results; by default nothing."""


def _macros(codes: CodesKind | None) -> dict[str, int]:
    return PLAIN_MACROS if codes is None else codes.macros


def _gemv(
    shape: tuple[int, int],
    device: torch.device,
    *,
    codes: CodesKind | None,
    macros: Mapping[str, int],
    adapters: AdaptersShape | None,
) -> Gemv | None:
    """The kernel for one row, if it is faster than a GEMM."""
    cut = gemv_cut(*shape, codes, is_added=bool(macros["RESIDUAL"]))
    if cut is None:
        return None
    of_codes = None if codes is None else adapters
    return Gemv(shape, device, codes=codes, cut=cut, macros=macros, adapters=of_codes)


def _kernel(cut: Cut, constants: dict[str, int], device: torch.device) -> CudaKernel:
    num_bytes = cut.shared_bytes + cut.pushed_bytes
    two = num_bytes <= most_bytes(shared_bytes(device), 2)
    if cut.numbers != PLAIN:
        two = two and cut.tokens * cut.features * cut.ways <= _TWO_OF_CODES
    constants = {
        **constants,
        "BLOCK": cut.numbers.block,
        "FEATURES": cut.features,
        "TOKENS": cut.tokens,
        "STAGES": cut.stages,
        "BY_WARP": cut.numbers != PLAIN and cut.tokens <= FEW_TOKENS,
        "SPLITS": cut.splits,
        "WAYS": cut.ways,
        "EVEN": cut.even,
        "SHARED_BYTES": cut.shared_bytes,
        "PER_PROCESSOR": 2 if two else 1,
    }
    module = CudaModule("linear.cu", constants, device)
    return module.kernel("linear", shared_bytes=num_bytes)
