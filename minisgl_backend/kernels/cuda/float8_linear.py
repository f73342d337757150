"""Launches ``float8_linear.cu``: linear layers with float8 weights for some hundred rows, on
Hopper.

A ``Float8Linear`` is for one shape, and has a kernel for each way to cut it
(``kernels.float8_cut``). They multiply rows that are rounded to float8, with one scale per row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.cuda.gates import gate_macros
from minisgl_backend.kernels.cuda.module import CudaModule, TensorMap, address, tensor_map
from minisgl_backend.kernels.cuda.weight_maps import WeightMaps
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.float8_cut import FEATURES, Float8Cut, cuts_of, why_not
from minisgl_backend.kernels.float8_rows import Float8Rows
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight, numbers_and_scales

_THREADS: Final = 384
"""Two warpgroups multiply, and one thread of the third fills the ring."""

_MOST_PARTS: Final = 2 * FEATURES * 128
"""The most sums that a thread block leaves: those of two tiles."""
_MOST_COUNTERS: Final = 2**16


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("weight", TensorMap),
        ("x", TensorMap),
        ("out", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("num_rows", ctypes.c_int),
        ("padding", ctypes.c_uint8 * 12),  # to the alignment of the maps
    )


class Workspace:
    """The memory that all kernels of a device share: the sums that thread blocks leave, and
    counters, which are 0 between launches."""

    def __init__(self, device: torch.device) -> None:
        self.parts = torch.empty((num_processors(device), _MOST_PARTS), device=device)
        self.counters = torch.zeros(_MOST_COUNTERS, dtype=torch.int32, device=device)


class Float8Kernel:
    """x W^T + bias; or with a ``gate``, gate(x G^T) * (x U^T) for a weight that holds G and then U.

    Launches share a workspace, so they must all be on one stream.
    """

    def __init__(
        self,
        shape: Sequence[int],
        workspace: Workspace,
        *,
        codes: CodesKind,
        gate: Gate | None,
        cut: Float8Cut,
    ) -> None:
        """``shape``: [height, in_features] of the weight."""
        self._height, self._in_features = shape
        assert codes.rounds_many_rows and why_not(self._height, self._in_features) is None
        self._gate, self._codes, self._cut = gate, codes, cut
        self._out_features = self._height if gate is None else self._height // 2
        device = workspace.parts.device
        constants = {
            "HEIGHT": self._height,
            "SIZE": self._in_features,
            **gate_macros(gate),
            "GROUPED": codes.group > 0,
            "TOKENS": cut.tokens,
            "SHARED": cut.shared,
            "STAGES": cut.stages,
            "SHARED_BYTES": cut.shared_bytes,
        }
        module = CudaModule("float8_linear.cu", constants, device)
        self._kernel = module.kernel("float8_linear", shared_bytes=cut.shared_bytes)
        self._num_processors = num_processors(device)
        self._workspace = workspace
        self._maps = WeightMaps(gated=gate is not None)

    def __call__(
        self,
        x: Float8Rows,
        weight: PackedWeight,
        *,
        bias: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """bfloat16 [num_rows, out_features]; ``x`` has one scale per row."""
        codes, scales, row_scales = numbers_and_scales(weight, self._codes)
        assert weight.order is None
        assert x.group == self._in_features
        num_rows, cut, numbers = x.num_rows, self._cut, x.numbers.view(torch.uint8)
        out = numbers.new_empty((num_rows, self._out_features), dtype=torch.bfloat16)
        columns = cut.columns(num_rows)
        blocks = cut.blocks(num_rows, self._height, self._in_features, self._num_processors)
        assert blocks and 2 * columns * self._height // FEATURES <= _MOST_COUNTERS
        size = self._in_features
        arguments = _Arguments(
            weight=self._maps(codes, 128, cut.loaded_rows),
            x=tensor_map(numbers, (size, num_rows), (size,), (128, cut.tokens)),
            out=address(out),
            factors=address(x.scales),
            scales=address(scales),
            row_scales=address(row_scales),
            bias=address(bias),
            parts=address(self._workspace.parts),
            counters=address(self._workspace.counters),
            num_rows=num_rows,
        )
        cluster = cut.cluster, 1, 1
        self._kernel.launch((columns, blocks, 1), _THREADS, arguments, cluster=cluster, pdl=pdl)
        return out


class Float8Linear:
    """The kernels of one weight's shape, for ``more_than`` and up to ``most_rows`` rows."""

    def __init__(
        self,
        shape: Sequence[int],
        workspace: Workspace,
        *,
        codes: CodesKind,
        gate: Gate | None,
        more_than: int,
    ) -> None:
        height, in_features = shape
        cuts = cuts_of(height, in_features, more_than=more_than)
        self.gate, self.most_rows = gate, max(cuts, default=0)
        made = partial(Float8Kernel, shape, workspace, codes=codes, gate=gate)
        with ThreadPoolExecutor() as pool:
            kernels = pool.map(lambda cut: made(cut=cut), cuts.values())
        self._kernels = dict(zip(cuts, kernels, strict=True))

    def __call__(
        self,
        x: Float8Rows,
        weight: PackedWeight,
        *,
        bias: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """[num_rows, out_features]; ``x`` has one scale per row."""
        kernel = self._kernels[min(most for most in self._kernels if x.num_rows <= most)]
        return kernel(x, weight, bias=bias, pdl=pdl)
