"""The weighted sum over a token's experts, with what follows it: the outputs of an expert that all
tokens take, the residual stream, and the next norm.
"""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit(do_not_specialize=["num_rows"])
def _sum_outputs(
    out_ptr,
    parts_ptr,
    weights_ptr,
    ids_ptr,
    shared_ptr,
    gate_ptr,
    gated_ptr,  # x of the gate
    squares_ptr,
    residual_ptr,
    norm_ptr,
    squares_out_ptr,
    num_rows,
    gate_eps,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a program
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # at least as many, a power of two
    ELSEWHERE: tl.constexpr,  # some ids may be -1, of rows that are not written
    SHARED: tl.constexpr,
    GATED: tl.constexpr,  # and of what all tokens take
    SQUARES: tl.constexpr,  # tiles of them, 0 if there are none
    SQUARES_PADDED: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,  # only the first half of it
    PDL: tl.constexpr,
):
    # Everything but the outputs and ``shared`` was written before the previous kernel began. That
    # kernel, or the one before it, has waited for whatever wrote it.
    if PDL and NORM:
        allow_next()  # a GEMM, which reads weights before it waits
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = i < SIZE
    choice = tl.arange(0, CHOICES)
    chosen = choice < TOP_K
    if ELSEWHERE:
        chosen = chosen & (tl.load(ids_ptr + row * TOP_K + choice, mask=chosen, other=-1) >= 0)
    weight = tl.load(weights_ptr + row * TOP_K + choice, mask=chosen, other=0.0)
    if NORM:
        norm = tl.load(norm_ptr + i, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(residual_ptr + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    gate = 1.0
    if GATED:
        k = tl.arange(0, BLOCK)
        x = tl.load(gated_ptr + row * SIZE + k, mask=k < SIZE, other=0.0).to(tl.float32)
        logit = tl.sum(x * tl.load(gate_ptr + k, mask=k < SIZE, other=0.0).to(tl.float32))
        if SQUARES > 0:
            tile = tl.arange(0, SQUARES_PADDED)
            at = squares_ptr + tile * num_rows + row
            square = tl.sum(tl.load(at, mask=tile < SQUARES, other=0.0))
            logit *= tl.rsqrt(square / SIZE + gate_eps)
        gate = tl.sigmoid(logit)
    if PDL:
        wait_previous()
        if not NORM:
            allow_next()  # the sum over the ranks reads the residual stream before it waits
    at = parts_ptr + (row * TOP_K + choice[:, None]) * SIZE + i[None, :]
    part = tl.load(at, mask=chosen[:, None] & mask[None, :], other=0.0).to(tl.float32)
    x = tl.sum(weight[:, None] * part, axis=0)  # [COLUMNS]
    if SHARED:
        x += gate * tl.load(shared_ptr + row * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        kept = (total + x).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * SIZE + i, kept, mask=mask)
        x = kept.to(tl.float32)
        square = tl.sum(x * x, axis=0)
        x *= norm
        if HALF:
            tl.store(squares_out_ptr + tl.program_id(1) * num_rows + row, square)
        else:
            x *= tl.rsqrt(square / SIZE + eps)
    tl.store(out_ptr + row * SIZE + i, x.to(out_ptr.dtype.element_ty), mask=mask)


def launch_sum_outputs(
    out: Tensor,
    outputs: Tensor,
    weights: Tensor,
    ids: Tensor | None,
    shared: Tensor | None,
    *,
    opening: tuple[Tensor, Tensor, Tensor | None, float] | None = None,
    added: tuple[Tensor, Tensor, float] | None = None,
    squares_out: Tensor | None = None,
    pdl: bool,
) -> None:
    """``out`` [num_tokens, size] = each token's weighted sum of its ``outputs`` [num_tokens, top_k,
    size], plus ``shared`` [num_tokens, size]. Outputs whose ``ids`` are -1 do not count.
    ``opening``: the inputs of the gate of ``shared``, which are the fields of a
    ``kernels.experts.SharedOutput`` from ``gate`` on. With ``added``, which are residual, norm and
    eps, the result is added to the residual in place, and ``out`` is the RMSNorm of that; with
    ``squares_out``, float32 [tiles, num_tokens], the norm is half done.
    """
    num_tokens, top_k, size = outputs.shape
    assert outputs.is_contiguous() and weights.is_contiguous()
    gate, x, squares, gate_eps = (None, None, None, 0.0) if opening is None else opening
    assert all(of is None or of.is_contiguous() for of in (shared, gate, x, squares))
    residual, norm, eps = (None, None, 0.0) if added is None else added
    num_squares = 0 if squares is None else len(squares)
    block, choices = triton.next_power_of_2(size), triton.next_power_of_2(top_k)
    columns = block if squares_out is None else triton.next_power_of_2(-(-size // len(squares_out)))
    _sum_outputs[(num_tokens, 1 if squares_out is None else len(squares_out))](
        out,
        outputs,
        weights,
        ids,
        shared,
        gate,
        x,
        squares,
        residual,
        norm,
        squares_out,
        num_tokens,
        gate_eps,
        eps,
        SIZE=size,
        BLOCK=block,
        COLUMNS=columns,
        TOP_K=top_k,
        CHOICES=choices,
        ELSEWHERE=ids is not None,
        SHARED=shared is not None,
        GATED=gate is not None,
        SQUARES=num_squares,
        SQUARES_PADDED=triton.next_power_of_2(max(num_squares, 1)),
        NORM=norm is not None,
        HALF=squares_out is not None,
        PDL=pdl,
        num_warps=min(max(choices * columns // 4096, 1), 16),
        **launch_options(pdl),
    )
