"""``kernels.likelihood`` in Triton: one program per row, which reads the row's logits once."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["tokens_ptr"])
def _likelihoods(
    of_token_ptr,
    total_ptr,
    rank_ptr,
    maxima_ptr,
    logits_ptr,
    stride,
    tokens_ptr,
    num_blocks,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAXIMA: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + index * stride
    of_token = tl.load(row_ptr + tl.load(tokens_ptr + index)).to(tl.float32)
    blocks = tl.arange(0, BLOCKS)
    within = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Each lane keeps the largest logit that it has seen and the sum of exp(x - largest). Lanes are
    # merged only at the end. A finite start keeps -inf - -inf out of the exponent.
    largest = tl.full([BLOCKS, BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCKS, BLOCK], tl.float32)
    above = tl.zeros([BLOCKS, BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCKS * BLOCK):
        at = start + within
        x = tl.load(row_ptr + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
        if MAXIMA:
            block = start // BLOCK + blocks
            place = maxima_ptr + index * num_blocks + block
            tl.store(place, tl.max(x, axis=1), mask=block < num_blocks)
        exponential = tl.exp(-tl.abs(x - largest))
        sums = tl.where(x > largest, sums * exponential + 1, sums + exponential)
        largest = tl.maximum(x, largest)
        above += (x > of_token).to(tl.int32)
    best = tl.max(tl.max(largest, axis=1), axis=0)
    mass = tl.sum(tl.sum(sums * tl.exp(largest - best), axis=1), axis=0)
    tl.store(of_token_ptr + index, of_token)
    tl.store(total_ptr + index, best + tl.log(mass))
    tl.store(rank_ptr + index, (1 + tl.sum(tl.sum(above, axis=1), axis=0)).to(tl.int64))


def launch_likelihoods(
    of_tokens: Tensor,
    totals: Tensor,
    ranks: Tensor,
    maxima: Tensor,
    logits: Tensor,
    tokens: Tensor,
    *,
    block: int,
) -> None:
    """For each row: the logit of its token, the logarithm of the sum of all exponentials, the rank,
    int64, and ``maxima`` [n, num_blocks], the largest logit of each ``block`` tokens of the
    vocabulary; no maxima if num_blocks is 0."""
    num_rows, vocab_size = logits.shape
    num_blocks = maxima.shape[1]
    _likelihoods[(num_rows,)](
        of_tokens,
        totals,
        ranks,
        maxima,
        logits,
        logits.stride(0),
        tokens,
        num_blocks,
        VOCAB=vocab_size,
        BLOCKS=32,
        BLOCK=block,
        MAXIMA=num_blocks > 0,
        num_warps=8,
    )
