"""The linear layers of a decode step on the tensor cores of Hopper, fused with what follows them.

A kernel is for one shape, and takes up to ``most_tokens`` rows of bfloat16. The classes differ in
what they do with x W^T (``fused_linear``).

RMSNorm has been applied to the input ``x`` [num_rows, in_features], fully or by half. Without
``squares``, it is done. With ``squares``, only the norm's weight has been applied, and the GEMM
divides each row by its root mean square: ``squares``, float32 [tiles, num_rows], holds each tile's
part of the row's sum of squares, from the preceding GEMM.

A weight is plain bfloat16, or a ``PackedWeight`` if the kernels were made for its ``kind``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.adapters import Adaptation, AdaptersShape
from minisgl_backend.kernels.cuda.adapters import ShrinkKernel, shrink_kernel
from minisgl_backend.kernels.cuda.float8_linear import Float8Linear, Workspace
from minisgl_backend.kernels.cuda.fused_linear import FusedLinear, Results
from minisgl_backend.kernels.cuda.heads import Heads
from minisgl_backend.kernels.cuda.module import address
from minisgl_backend.kernels.linear_cut import MAX_TOKENS, Cut, cuts_of_many
from minisgl_backend.kernels.packed_weight import CodesKind, PackedWeight
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces


class LinearKernel(FusedLinear):
    """x W^T; or with a ``gate``, gate(x G^T) * (x U^T) for a weight that holds G and then U."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        gate: Gate | None = None,
        most_tokens: int = MAX_TOKENS,
        cuts: Mapping[int, Cut] | None = None,
        codes: CodesKind | None = None,
        adapters: AdaptersShape | None = None,
    ) -> None:
        """``shape`` is the weight's."""
        self.gate = gate
        self._out_features = shape[0] if gate is None else shape[0] // 2
        super().__init__(
            shape,
            device,
            Results(gate=gate),
            most_tokens=most_tokens,
            cuts=cuts,
            codes=codes,
            adapters=adapters,
        )

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        *,
        squares: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        adaptation: Adaptation | None = None,
        out: Tensor | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """[num_rows, out_features], in ``out`` if that is given; ``eps`` is the norm's."""
        if out is None:
            out = torch.empty((len(x), self._out_features), dtype=x.dtype, device=x.device)
        assert out.is_contiguous()
        features = self._out_features
        self._launch(
            x,
            weight,
            pdl,
            bias=bias,
            adaptation=adaptation,
            squares=squares,
            eps=eps,
            out=address(out),
            features=features,
        )
        return out


class ResidualKernel(FusedLinear):
    """A GEMM added to the residual stream, and the first half of the norm after it."""

    def __init__(
        self,
        shape: Sequence[int],
        device: torch.device,
        *,
        most_tokens: int = MAX_TOKENS,
        cuts: Mapping[int, Cut] | None = None,
        codes: CodesKind | None = None,
        adapters: AdaptersShape | None = None,
    ) -> None:
        super().__init__(
            shape,
            device,
            Results(residual=True),
            most_tokens=most_tokens,
            cuts=cuts,
            codes=codes,
            adapters=adapters,
        )

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        bias: Tensor | None = None,
        adaptation: Adaptation | None = None,
        pdl: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """``residual`` [num_rows, out_features] += x W^T + bias, in place. Returns ``x`` and
        ``squares`` of the next GEMM."""
        scaled = torch.empty_like(residual)
        tiles = self._num_tiles(len(x), adapted=adaptation is not None)
        squares = torch.empty((tiles, len(x)), dtype=torch.float32, device=x.device)
        self._launch(
            x,
            weight,
            pdl,
            bias=bias,
            adaptation=adaptation,
            out=address(residual),
            features=self._height,
            scaled=address(scaled),
            norm_weight=address(norm_weight),
            squares_out=address(squares),
        )
        return scaled, squares


class HeadsKernel(FusedLinear):
    """Computes queries, keys and values: normalizes each head, rotates it, and stores keys and
    values in pages."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        in_features: int,
        device: torch.device,
        *,
        page_size: int,
        fp8: bool,
        most_tokens: int = MAX_TOKENS,
        cuts: Mapping[int, Cut] | None = None,
        codes: CodesKind | None = None,
        adapters: AdaptersShape | None = None,
    ) -> None:
        """``fp8``: the pages' type is float8_e4m3fn."""
        shape = (num_heads + 2 * num_kv_heads) * head_dim, in_features
        super().__init__(
            shape,
            device,
            Results(head_dim=head_dim, page_size=page_size, fp8=fp8),
            most_tokens=most_tokens,
            cuts=cuts,
            codes=codes,
            adapters=adapters,
        )
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | PackedWeight,
        places: TokenPlaces,
        kv: PagedKV,
        *,
        squares: Tensor | None = None,
        eps: float,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        bias: Tensor | None = None,
        adaptation: Adaptation | None = None,
        pdl: bool = False,
    ) -> Tensor:
        """The queries, [num_rows, num_heads, head_dim].

        See ``minisgl_backend.kernels.rope_store.qk_norm_rope_store``; positions and slots are
        int32. ``eps`` is for all norms.
        """
        positions, slots, keys, values = places.positions, places.slots, kv.keys, kv.values
        assert positions.dtype == slots.dtype == torch.int32
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        shape = (len(x), self._num_heads, self._head_dim)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        item = keys.element_size()
        heads = Heads(
            positions=address(positions),
            slots=address(slots),
            cos_sin=address(places.cos_sin),
            q_weight=address(q_weight),
            k_weight=address(k_weight),
            keys=address(keys),
            values=address(values),
            k_scale=address(kv.k_scale),
            v_scale=address(kv.v_scale),
            page_stride=keys.stride(0) * item,
            slot_stride=keys.stride(1) * item,
            head_stride=keys.stride(2) * item,
            num_heads=self._num_heads,
            num_kv_heads=self._num_kv_heads,
        )
        self._launch(
            x,
            weight,
            pdl,
            bias=bias,
            adaptation=adaptation,
            squares=squares,
            eps=eps,
            out=address(out),
            features=self._num_heads * self._head_dim,
            heads=heads,
        )
        return out


def _for_many(
    shape: tuple[int, int], device: torch.device, *, codes: CodesKind, gate: Gate | None
) -> LinearKernel:
    cuts = cuts_of_many(*shape, codes.numbers(shape[1]))
    return LinearKernel(shape, device, gate=gate, most_tokens=max(cuts), cuts=cuts, codes=codes)


class TensorCores:
    """Makes the kernels of a model's layers: ``linear`` makes a ``LinearKernel``, ``residual`` a
    ``ResidualKernel`` and ``heads`` a ``HeadsKernel``, each for up to ``most_tokens`` rows. For
    quantized weights and more rows, ``float8`` makes a ``Float8Linear``, and ``for_many`` a
    ``LinearKernel`` of those that are not float8. ``shrink`` computes x A^T of adapters. Layers of
    the same shape share a kernel and its memory."""

    def __init__(self, device: torch.device, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.linear = cache(partial(LinearKernel, device=device, most_tokens=most_tokens))
        self.residual = cache(partial(ResidualKernel, device=device, most_tokens=most_tokens))
        self.heads = cache(partial(HeadsKernel, device=device, most_tokens=most_tokens))
        self.for_many = cache(partial(_for_many, device=device))
        self._device = device

    @cached_property
    def shrink(self) -> ShrinkKernel:
        return shrink_kernel(self._device)

    @cached_property
    def float8(self) -> Callable[..., Float8Linear]:
        workspace = Workspace(self._device)
        return cache(partial(Float8Linear, workspace=workspace, more_than=self.most_tokens))
