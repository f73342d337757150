"""A GEMM of blocks of rows, each with the weight of its own expert."""

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.gates import ClampedGate, ExpertsGate, LimitedGate
from minisgl_backend.kernels.triton_kernels.layer_kernels import limited, opened


@triton.jit
def _grouped_linear(
    out_ptr,
    x_ptr,
    weight_ptr,
    pairs_ptr,
    experts_ptr,
    bias_ptr,
    num_pairs,
    out_features,
    TOP_K: tl.constexpr,  # rows of the output for each row of x
    SIZE: tl.constexpr,  # in_features
    ROWS: tl.constexpr,  # pairs of a block
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ALPHA: tl.constexpr,  # of a clamped gate, or None
    LIMIT: tl.constexpr,  # of a clamped or limited gate; None for SiLU and GELU
    ON_INPUT: tl.constexpr,  # of a limited gate
    GELU: tl.constexpr,
    SQUARES_RELU: tl.constexpr,  # of what has no gates
    STAGES: tl.constexpr,
):
    # neighbours in the grid share an expert's columns, so that these stay in the cache
    expert = tl.load(experts_ptr + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + tl.program_id(0) * ROWS + tl.arange(0, ROWS))  # [ROWS]
    held = pair < num_pairs
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < out_features
    k = tl.arange(0, BLOCK)
    x_at = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * SIZE + k[None, :]
    height = out_features * 2 if GATED else out_features
    w_at = weight_ptr + (expert * height + column)[None, :] * SIZE + k[:, None]
    up_offset = out_features.to(tl.int64) * SIZE
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    acc_up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        inside = start + k < SIZE
        x = tl.load(x_at + start, mask=held[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=inside[:, None] & in_columns[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            u = tl.load(
                w_at + up_offset + start, mask=inside[:, None] & in_columns[None, :], other=0.0
            )
            acc_up = tl.dot(x, u, acc_up, input_precision="ieee")
    if BIAS:
        b_at = bias_ptr + expert * height + column
        acc += tl.load(b_at, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up = tl.load(b_at + out_features, mask=in_columns, other=0.0)
            acc_up += b_up.to(tl.float32)[None, :]
    y = acc
    if GATED:
        if LIMIT is None:
            y = opened(acc, acc_up, GELU)
        elif ALPHA is None:
            y = limited(acc, acc_up, LIMIT, ON_INPUT)
        else:
            acc = tl.minimum(acc, LIMIT)
            acc_up = tl.minimum(tl.maximum(acc_up, -LIMIT), LIMIT)
            y = (acc_up + 1) * acc * tl.sigmoid(ALPHA * acc)
    if SQUARES_RELU:
        y = tl.maximum(acc, 0.0)
        y *= y
    to = out_ptr + pair.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=held[:, None] & in_columns[None, :])


def launch_grouped_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    experts: Tensor,
    *,
    bias: Tensor | None = None,
    block: int,
    top_k: int,
    gate: ExpertsGate | None,
    squares_relu: bool = False,
) -> None:
    """``out`` [num_pairs, out_features]: row p is x[p // top_k] through the expert of pair p.

    ``weight`` [num_experts, height, in_features]; ``pairs`` and ``experts`` are a
    ``kernels.routing.Alignment`` in blocks of ``block``; ``bias`` [num_experts, height]. With a
    ``gate``, ``weight`` holds gates and then ups, and ``out`` is half as wide. Without one the
    result may be the square of ReLU.
    """
    num_pairs, out_features = out.shape
    if num_pairs == 0:
        return
    assert weight.is_contiguous() and x.is_contiguous() and out.is_contiguous()
    columns = 64
    _grouped_linear[(len(experts), triton.cdiv(out_features, columns))](
        out,
        x,
        weight,
        pairs,
        experts,
        bias,
        num_pairs,
        out_features,
        TOP_K=top_k,
        SIZE=x.shape[1],
        ROWS=block,
        COLUMNS=columns,
        BLOCK=64 if block >= 64 else 128,
        GATED=gate is not None,
        BIAS=bias is not None,
        ALPHA=gate.alpha if isinstance(gate, ClampedGate) else None,
        LIMIT=gate.limit if isinstance(gate, (ClampedGate, LimitedGate)) else None,
        ON_INPUT=isinstance(gate, LimitedGate) and gate.on_input,
        GELU=gate == "gelu",
        SQUARES_RELU=squares_relu,
        STAGES=4 if block >= 64 else 3,
        num_warps=4,
    )
