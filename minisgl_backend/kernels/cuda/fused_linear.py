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
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.adapters import Adaptation, AdaptersShape
from minisgl_backend.kernels.cuda.adapters import shrink_kernel
from minisgl_backend.kernels.cuda.gates import gate_macros
from minisgl_backend.kernels.cuda.gemv import Gemv
from minisgl_backend.kernels.cuda.heads import Heads
from minisgl_backend.kernels.cuda.module import (
    CudaKernel,
    CudaModule,
    TensorMap,
    address,
    tensor_map,
)
from minisgl_backend.kernels.cuda.weight_maps import WeightMaps
from minisgl_backend.kernels.dispatch import num_processors, shared_bytes
from minisgl_backend.kernels.gemv_cut import gemv_cut
from minisgl_backend.kernels.linear_cut import BATCHES, BLOCK, FEW_TOKENS, PLAIN, Cut, cut_of
from minisgl_backend.kernels.packed_weight import (
    CodesKind,
    PackedWeight,
    code_macros,
    numbers_and_scales,
)
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
        ("row_scales", ctypes.c_void_p),
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
    """The kernel with a cut. ``joined``: it computes x A^T of adapters itself."""

    cut: Cut
    kernel: CudaKernel
    joined: _Joined | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What is done with x W^T: by default nothing.

    With a ``gate``, the weight holds G and then U, and gate(x G^T) * (x U^T) is left. If
    ``residual``, the product is added to the residual stream. With a ``head_dim``, it consists of
    heads of this size, whose keys and values are stored in pages of ``page_size``, which are
    float8_e4m3fn if ``fp8``.
    """

    gate: Gate | None = None
    residual: bool = False
    head_dim: int | None = None
    page_size: int = 1
    fp8: bool = False

    @property
    def macros(self) -> dict[str, int]:
        """Those that ``linear.cu`` and ``gemv.cu`` have in common."""
        return {
            **gate_macros(self.gate),
            "RESIDUAL": self.residual,
            "FP8": self.fp8,
            "PAGE_SIZE": self.page_size,
        }


class FusedLinear:
    """The kernels for weights of one ``shape``, [height, in_features], and up to ``most_tokens``
    rows.

    Launches share memory, so they must all be on one stream.
    """

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        results: Results,
        *,
        most_tokens: int,
        cuts: Mapping[int, Cut] | None,
        codes: CodesKind | None,
        adapters: AdaptersShape | None,
    ) -> None:
        """``cuts`` are keyed by the largest batch that each is for. By default they are those of
        ``cut_of``, besides the kernel of ``cuda.gemv`` if it is faster for one row. ``codes``: the
        kind of packed weights. ``adapters``: launches may have an adaptation of this shape, for
        which there are separate kernels."""
        self.most_tokens = most_tokens
        self._height, self._in_features = shape
        self._device, self._num_processors = device, num_processors(device)
        self._results, self._codes, self._adapters = results, codes, adapters
        self._gemv = self._make_gemv() if cuts is None else None
        self._kernels = {False: self._compile(cuts or self._cuts(), adapted=False)}
        if adapters is not None:
            # joined, thread blocks wait for those that compute x A^T, so all must run at the same
            # time; more of them have not made larger batches faster
            own = cuts or self._cuts(shared=False)
            self._kernels[True] = self._compile(own, adapted=True)
        self._shrink = None if adapters is None else shrink_kernel(device)
        self._turns = torch.zeros(2, dtype=torch.int32, device=device)
        even = [of.cut for of in self._kernels[False].values() if of.cut.even]
        # a thread block without a step would write no partial result, and another would wait for it
        assert all(cut.num_steps(*shape) >= self._num_processors for cut in even)
        elements = max((cut.features * cut.tokens for cut in even), default=0)
        self._parts = torch.empty((self._num_processors, elements), device=device)
        self._are_there = torch.zeros(self._num_processors, dtype=torch.int32, device=device)
        self._maps = WeightMaps(gated=results.gate is not None)
        self._maps_of_a = WeightMaps(gated=False)

    def _make_gemv(self) -> Gemv | None:
        """The kernel for one row, if it is faster than a GEMM."""
        shape, codes, results = (self._height, self._in_features), self._codes, self._results
        cut = gemv_cut(*shape, codes, is_added=results.residual)
        if cut is None:
            return None
        macros = {**results.macros, "HEADS": results.head_dim or 0}
        adapters = None if codes is None else self._adapters
        return Gemv(shape, self._device, codes=codes, cut=cut, macros=macros, adapters=adapters)

    def _cuts(self, *, shared: bool = True) -> dict[int, Cut]:
        """The cuts by default, keyed by the largest batch that each is for."""
        numbers = PLAIN if self._codes is None else self._codes.numbers(self._in_features)
        return {
            batch: cut_of(
                batch,
                self._height,
                self._in_features,
                head_dim=self._results.head_dim,
                numbers=numbers,
                gated=self._results.gate is not None,
                shared=shared,
            )
            for batch in BATCHES
            if batch <= self.most_tokens
        }

    def _compile(self, cuts: Mapping[int, Cut], *, adapted: bool) -> dict[int, _CutKernel]:
        """The kernels with these ``cuts``, by the same keys."""
        wanted = {
            batch: (cut, self._join(batch, cut) if adapted else None) for batch, cut in cuts.items()
        }
        different = list(dict.fromkeys(wanted.values()))

        def compiled(what: tuple[Cut, _Joined | None]) -> _CutKernel:
            cut, joined = what
            constants = {
                **code_macros(self._codes),
                **self._results.macros,
                "HEADS": self._results.head_dim is not None,
                "SIZE": self._in_features,
                "WHOLE": self._height % cut.features == 0,
                "ADAPTED": adapted,
                "JOINED": joined is not None,
            }
            return _CutKernel(cut, _kernel(cut, constants, self._device), joined)

        with ThreadPoolExecutor() as pool:
            kernels = dict(zip(different, pool.map(compiled, different), strict=True))
        return {batch: kernels[what] for batch, what in wanted.items()}

    def _join(self, batch: int, cut: Cut) -> _Joined | None:
        """Not None if GEMMs of up to ``batch`` rows compute x A^T themselves."""
        assert self._adapters is not None
        num_slots, columns = self._adapters
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
        """``values`` are the arguments about results, which both sources have by the same names."""
        num_rows, in_order = len(x), x
        if isinstance(weight, PackedWeight):
            x = weight.ordered(x)
        numbers, scales, row_scales = numbers_and_scales(weight, self._codes)
        gemv = self._gemv_for(num_rows, adapted=adaptation is not None)
        if gemv is not None:
            gemv(
                x,
                numbers,
                scales,
                row_scales,
                squares=squares,
                bias=bias,
                adaptation=adaptation,
                x_of_a=in_order,
                pdl=pdl,
                **values,
            )
            return
        assert x.stride(1) == 1 and numbers.is_contiguous()
        assert num_rows <= max(self._kernels[False])
        of_cut = self._kernel_for(num_rows, adapted=adaptation is not None)
        cut, joined = of_cut.cut, of_cut.joined
        tiles = cut.num_tiles(self._height)
        token_tiles = -(-num_rows // cut.tokens)
        # thread blocks with even parts wait for each other, so all must run at the same time
        blocks = self._num_processors // token_tiles if cut.even else tiles
        if joined is not None and not cut.even:
            blocks += joined.tiles
        inner: Tensor | None = None
        if adaptation is not None:
            if joined is None:
                assert self._shrink is not None
                inner = self._shrink(in_order, adaptation, turns=self._turns, pdl=pdl)
            values |= self._of_adapters(adaptation, of_cut, inner)
        arguments = _Arguments(
            weight=self._maps(numbers, cut.numbers.block_bytes // numbers.itemsize, cut.features),
            scales=address(scales),
            row_scales=address(row_scales),
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
        grid, cluster = (token_tiles, blocks, cut.splits), (1, 1, cut.splits)
        of_cut.kernel.launch(grid, cut.threads, arguments, cluster=cluster, pdl=pdl)

    def _of_adapters(
        self, adaptation: Adaptation, of_cut: _CutKernel, inner: Tensor | None
    ) -> dict[str, Any]:
        """The arguments about adapters. ``inner`` is x A^T, unless the GEMM computes it itself."""
        memory, tokens, joined = adaptation.memory, adaptation.tokens, of_cut.joined
        assert memory.a.is_contiguous() and memory.b.is_contiguous()
        assert memory.a.shape[:2] == self._adapters
        second, third = memory.later_projections
        adapters = _Adapters(
            b=address(memory.b),
            slots=address(tokens.slots),
            ranks=address(tokens.ranks),
            slot_stride=memory.b.stride(0),
            columns=memory.a.shape[1],
            max_rank=memory.b.shape[2],
            second=second,
            third=third,
        )
        if joined is None:
            adapters.inner, adapters.turns = address(inner), address(self._turns)
            return {"adapters": adapters}
        adapters.tiles_of_a = joined.tiles
        adapters.pairs, adapters.launches = address(joined.pairs), address(joined.launches)
        a = self._maps_of_a(memory.a.flatten(0, 1), BLOCK, of_cut.cut.features)
        return {"adapters": adapters, "a": a}


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
        "PUSHED": cut.pushed_bytes > 0,
        "SHARED_BYTES": cut.shared_bytes,
        "PER_PROCESSOR": 2 if two else 1,
    }
    module = CudaModule("linear.cu", constants, device)
    return module.kernel("linear", shared_bytes=num_bytes)
