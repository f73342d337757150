"""Updates of recurrent states that steps have left pending (``kernels.layer_states``): the parts of
kernels that add them to a state, and that tell where those begin that are left next.
"""

import triton
import triton.language as tl

from minisgl_backend.kernels.chunk_runs import RUN_COLUMNS

RUN = tl.constexpr(RUN_COLUMNS)


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


@triton.jit
def places_after(blocks_ptr, runs_ptr, run, num_runs, EVERY: tl.constexpr):
    """The slots of the runs ``run``, and the places of the first updates that may be pending after
    them; the slot is -1 if there is no such run."""
    run_ptr = runs_ptr + run * RUN
    slot = tl.load(run_ptr + 2, mask=run < num_runs, other=-1).to(tl.int64)
    first = tl.load(run_ptr, mask=slot >= 0, other=0)
    last = tl.load(run_ptr + 1, mask=slot >= 0, other=1)
    position = tl.load(run_ptr + 3, mask=slot >= 0, other=0)
    begin = tl.load(blocks_ptr + first * 4, mask=slot >= 0, other=0)
    end = tl.load(blocks_ptr + last * 4 - 3, mask=slot >= 0, other=0)
    return slot, (position + end - begin) % EVERY
