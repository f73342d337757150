"""Updates of recurrent states that steps have left pending (``kernels.layer_states``): the part of
kernels that adds them to a state.
"""

import triton
import triton.language as tl


@triton.jit
def with_pending(
    state,
    lines_ptr,
    columns_ptr,
    decays_ptr,
    begin,
    end,
    i,
    j,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr = 1,  # updates that are loaded at once
):
    """``state``, lines ``i`` of ``LINES`` and columns ``j`` of ``COLUMNS``, with the updates
    ``begin`` to ``end``, of which there are some. An update is the product of a vector of lines and
    one of columns: of a key and a value, or of a value and a key. All are read past the first-level
    cache, since other kernels have written them."""
    decay = tl.load(decays_ptr + end - 1, cache_modifier=".cg")
    state *= tl.exp(decay)
    for place in tl.range(begin, end, loop_unroll_factor=UNROLL):
        left = tl.exp(decay - tl.load(decays_ptr + place, cache_modifier=".cg"))
        of_lines = tl.load(
            lines_ptr + place * LINES + i, mask=i < LINES, other=0.0, cache_modifier=".cg"
        )
        of_columns = tl.load(
            columns_ptr + place * COLUMNS + j, mask=j < COLUMNS, other=0.0, cache_modifier=".cg"
        )
        state += of_lines[:, None] * (left * of_columns)[None, :]
    return state
