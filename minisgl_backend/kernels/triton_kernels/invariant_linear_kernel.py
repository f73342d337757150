"""A GEMM that adds up the products of an element in the same order for any number of rows.

Tensor cores add in_features in order to one float32, 16 per instruction. Tiles may have any size:
an element's sum does not depend on it.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl_backend.kernels.triton_kernels.pdl import allow_next, launch_options, wait_previous


@triton.jit(do_not_specialize=["num_rows"])
def _invariant_linear(
    out_ptr,
    x,
    weight,
    bias_ptr,
    num_rows,
    out_features,
    SIZE: tl.constexpr,  # in_features
    ROWS: tl.constexpr,  # of x, in a tile
    COLUMNS: tl.constexpr,  # output features of a tile
    BLOCK: tl.constexpr,  # in_features of an iteration
    GROUP: tl.constexpr,  # tiles of rows that share the weight's tiles while these are in the cache
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    num_columns = tl.cdiv(out_features, COLUMNS)
    in_group = GROUP * num_columns
    first = program // in_group * GROUP
    height = tl.minimum(tl.cdiv(num_rows, ROWS) - first, GROUP)
    m = (first + program % in_group % height) * ROWS
    n = program % in_group // height * COLUMNS
    if PDL:
        allow_next()
        wait_previous()
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=STAGES):
        a = x.load([m, start])
        w = weight.load([n, start])
        acc = tl.dot(a, tl.trans(w), acc)
    column = n + tl.arange(0, COLUMNS)
    row = m + tl.arange(0, ROWS)
    inside = column < out_features
    if BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + row[:, None].to(tl.int64) * out_features + column[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & inside[None, :])


def launch_invariant_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    rows: int,
    columns: int,
    block: int,
    stages: int,
    num_warps: int,
    pdl: bool,
) -> None:
    num_rows, size = x.shape
    out_features = len(weight)
    tiles = triton.cdiv(num_rows, rows) * triton.cdiv(out_features, columns)
    _invariant_linear[(tiles,)](
        out,
        TensorDescriptor.from_tensor(x, [rows, block]),
        TensorDescriptor.from_tensor(weight, [columns, block]),
        bias,
        num_rows,
        out_features,
        SIZE=size,
        ROWS=rows,
        COLUMNS=columns,
        BLOCK=block,
        GROUP=8,
        BIAS=bias is not None,
        STAGES=stages,
        PDL=pdl,
        num_warps=num_warps,
        **launch_options(pdl),
    )
