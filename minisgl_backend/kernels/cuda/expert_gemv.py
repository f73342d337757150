"""Launches ``expert_gemv.cu``: a few tokens times the weights of their experts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from minisgl_backend.gates import ExpertsGate
from minisgl_backend.kernels.cuda.gates import gate_arguments, gate_macros
from minisgl_backend.kernels.cuda.module import CudaModule, address
from minisgl_backend.kernels.gemv_cut import ROWS, GemvCut, expert_codes_bytes
from minisgl_backend.kernels.packed_weight import (
    CodesKind,
    PackedWeight,
    code_macros,
    numbers_and_scales,
)


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("of_all", ctypes.c_int),
        ("early", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
    )


class ExpertGemv:
    """One of the two products of layers whose experts have weights of this ``shape``, [num_experts,
    height, in_features], plain or in ``codes``. With a ``gate`` it holds G and then U, and the
    result is gate(x G^T) * (x U^T). If it ``squares_relu``, it is relu(x W^T)^2. Either makes it
    the first product, which reads the rows of tokens."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        codes: CodesKind | None,
        gate: ExpertsGate | None,
        squares_relu: bool = False,
        cut: GemvCut,
    ) -> None:
        _, self._height, in_features = shape
        self._gate, self._codes = gate, codes
        self._reads_tokens = gate is not None or squares_relu
        self._out_features = self._height if gate is None else self._height // 2
        self._threads = 32 * cut.warps
        constants = {
            **code_macros(codes),
            "SIZE": in_features,
            "HEIGHT": self._height,
            **gate_macros(gate, squares_relu=squares_relu),
            "WARPS": cut.warps,
            "COLUMNS": cut.columns,
            "PER_PROCESSOR": cut.per_processor,
        }
        module = CudaModule("expert_gemv.cu", constants, device)
        shared_bytes = expert_codes_bytes(cut, codes)
        self._kernel = module.kernel("expert_gemv", shared_bytes=shared_bytes, most_shared=True)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        ids: Tensor,
        *,
        factors: Tensor | None = None,
        bias: Tensor | None = None,
        of_all: int | None = None,
        early: bool = False,
        pdl: bool = False,
    ) -> Tensor:
        """[choices, out_features], a row for each of the choices ``ids`` int32 [num_tokens, top_k];
        the row of a choice of -1 is not written. In the first product, a row of ``x`` [num_tokens,
        in_features] goes through all experts of its token; otherwise a row of ``x`` [choices,
        in_features] goes through its own expert.

        In the first, x is multiplied by ``factors`` [num_tokens]. ``bias`` [num_experts, height] is
        added before a gate. ``of_all``: the expert that is the last choice of all tokens, if there
        is one. ``early``: of these, the kernel before this one wrote only x.
        """
        numbers, scales, row_scales = numbers_and_scales(weight, self._codes)
        assert ids.dtype == torch.int32
        assert all(of is None or of.is_contiguous() for of in (x, numbers, ids, bias))
        assert len(x) == (len(ids) if self._reads_tokens else ids.numel())
        assert factors is None or self._reads_tokens
        out = torch.empty((ids.numel(), self._out_features), dtype=x.dtype, device=x.device)
        arguments = _Arguments(
            weight=address(numbers),
            scales=address(scales),
            row_scales=address(row_scales),
            bias=address(bias),
            x=address(x),
            ids=address(ids),
            factors=address(factors),
            out=address(out),
            of_all=-1 if of_all is None else of_all,
            early=early,
            **gate_arguments(self._gate),
        )
        grid = self._height // ROWS, ids.shape[1], len(ids)
        self._kernel.launch(grid, self._threads, arguments, pdl=pdl)
        return out
