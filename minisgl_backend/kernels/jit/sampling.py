"""Sampling in two launches: splits of each row in parallel, then a program per row.

The first scores each split by its largest logit; or for rows that draw from all tokens, by the
logarithm of the sum of their weights and noise. The second takes the best split, and in it the best
token or one drawn from it; for rows with filters it draws among what passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.jit.filters import choose_filtered
from minisgl_backend.kernels.jit.logits import load_logits, load_penalty
from minisgl_backend.kernels.jit.noise import gumbel, noise_key
from minisgl_backend.kernels.jit.pdl import allow_next, launch_options, wait_previous
from minisgl_backend.kernels.sampling import split_size

if TYPE_CHECKING:
    from minisgl_backend.kernels.sampling import Penalties, RowParameters, SamplingWorkspace


_LOG2_E = tl.constexpr(1.4426950408889634)
_NEIGHBOURS = tl.constexpr(8)  # tokens that a thread loads at once, of bf16 logits
_DRAW_BLOCK = tl.constexpr(1024)  # a split has some thousand tokens: of more, many would be masked
_LEAST = tl.constexpr(-3.0e38)  # finite, so that nothing that is -inf is taken from -inf

BY_ROW = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seeds_ptr", "positions_ptr"]
"""Arguments that are ``RowParameters``, in all alignments."""


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def _best_of_split(
    best_ptr,
    token_ptr,
    logits_ptr,
    stride,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    lines_ptr,
    counts_ptr,
    in_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    if PDL:
        allow_next()
        wait_previous()
    temperature = tl.load(temperature_ptr + row)
    filtered = (
        (tl.load(top_k_ptr + row) > 0)
        | (tl.load(top_p_ptr + row) < 1)
        | (tl.load(min_p_ptr + row) > 0)
    )
    noisy = (temperature > 0) & (filtered == 0)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    penalty = load_penalty(
        row,
        lines_ptr,
        counts_ptr,
        in_prompt_ptr,
        repetition_ptr,
        presence_ptr,
        frequency_ptr,
        VOCAB,
        PENALTIES,
    )
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    broken = tl.zeros([BLOCK], tl.int32)
    if noisy:
        # Weights are exp2(x * scale - best), sums of them online (arXiv 1805.02867). Neighbours
        # share a best, so that a token takes one exp2, not two.
        scale = inverse * _LOG2_E
        bests = tl.full([BLOCK // _NEIGHBOURS], _LEAST, tl.float32)
        mass = tl.zeros([BLOCK // _NEIGHBOURS], tl.float32)
        for start in tl.static_range(0, PER_SPLIT, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            x = load_logits(logits_ptr + row * stride, at, at < end, penalty, VOCAB, PENALTIES)
            broken |= tl.where(x < float("inf"), 0, 1)  # inf or NaN
            scaled = tl.reshape(x * scale, [BLOCK // _NEIGHBOURS, _NEIGHBOURS])
            new_bests = tl.maximum(bests, tl.max(scaled, axis=1))
            weights = tl.exp2(scaled - new_bests[:, None])
            mass = mass * tl.exp2(bests - new_bests) + tl.sum(weights, axis=1)
            bests = new_bests
        top = tl.max(bests, axis=0)
        whole = tl.sum(mass * tl.exp2(bests - top), axis=0)
        key = noise_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        # ids behind the vocabulary stand for the splits
        drawn = gumbel(key, VOCAB + split + tl.zeros([1], tl.int32))
        score = (top + tl.log2(tl.maximum(whole, 1.0))) / _LOG2_E + tl.max(drawn, axis=0)
        score = tl.where(whole > 0, score, float("-inf"))
        chosen = VOCAB
    else:
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        token = tl.full([BLOCK], VOCAB, tl.int32)
        for start in tl.static_range(0, PER_SPLIT, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            x = load_logits(logits_ptr + row * stride, at, at < end, penalty, VOCAB, PENALTIES)
            broken |= tl.where(x < float("inf"), 0, 1)
            better = x > best
            best = tl.where(better, x, best)
            token = tl.where(better, at, token)
        score = tl.max(best, axis=0)
        # the least token among equals
        chosen = tl.min(tl.where(best == score, token, VOCAB), axis=0)
    if tl.max(broken, axis=0) > 0:
        score = float("inf")
    tl.store(best_ptr + row * SPLITS + split, score)
    tl.store(token_ptr + row * SPLITS + split, chosen)


@triton.jit
def _draw(
    row_ptr,
    split,
    penalty,
    inverse,
    key,
    VOCAB: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PENALTIES: tl.constexpr,
):
    """A token of the split, drawn from the softmax over it."""
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], VOCAB, tl.int32)
    for start in tl.static_range(0, PER_SPLIT, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        x = load_logits(row_ptr, at, at < end, penalty, VOCAB, PENALTIES)
        x = x * inverse + gumbel(key, at)
        better = x > best
        best = tl.where(better, x, best)
        token = tl.where(better, at, token)
    return tl.min(tl.where(best == tl.max(best, axis=0), token, VOCAB), axis=0)


@triton.jit(do_not_specialize_on_alignment=BY_ROW)
def _choose(
    out_ptr,
    best_ptr,
    token_ptr,
    scaled_ptr,
    candidates_ptr,
    logits_ptr,
    stride,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    lines_ptr,
    counts_ptr,
    in_prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    VOCAB: tl.constexpr,
    SPLITS: tl.constexpr,
    PER_SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PENALTIES: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        allow_next()
        wait_previous()
    s = tl.arange(0, SPLITS)
    bests = tl.load(best_ptr + row * SPLITS + s)
    tokens = tl.load(token_ptr + row * SPLITS + s)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == best, tokens, VOCAB), axis=0)
    finite = (best < float("inf")) & (best > float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.minimum(tl.load(top_k_ptr + row), VOCAB)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if finite & (temperature > 0):
        penalty = load_penalty(
            row,
            lines_ptr,
            counts_ptr,
            in_prompt_ptr,
            repetition_ptr,
            presence_ptr,
            frequency_ptr,
            VOCAB,
            PENALTIES,
        )
        row_ptr, inverse = logits_ptr + row * stride, 1.0 / temperature
        key = noise_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        if filtered:
            token = choose_filtered(
                row_ptr,
                penalty,
                best,
                inverse,
                top_k,
                top_p,
                min_p,
                key,
                scaled_ptr + row * CANDIDATES,
                candidates_ptr + row * CANDIDATES,
                VOCAB,
                BLOCK,
                CANDIDATES,
                PENALTIES,
            )
        else:
            split = tl.min(tl.where(bests == best, s, SPLITS), axis=0)
            token = _draw(
                row_ptr, split, penalty, inverse, key, VOCAB, PER_SPLIT, _DRAW_BLOCK, PENALTIES
            )
    tl.store(out_ptr + row, tl.where(finite, token, -1))


def launch_sample(
    out: Tensor,
    logits: Tensor,
    rows: RowParameters,
    workspace: SamplingWorkspace,
    penalties: Penalties | None,
    *,
    pdl: bool,
) -> None:
    """See ``minisgl_backend.kernels.sampling.sample``."""
    batch_size, vocab_size = logits.shape
    splits = workspace.best.shape[1]
    inputs = [logits, logits.stride(0), rows.temperature, rows.top_k, rows.top_p, rows.min_p]
    inputs += [rows.seeds, rows.positions]
    if penalties is None:
        inputs += [None] * 6
    else:
        inputs += [penalties.lines, penalties.output_counts, penalties.in_prompt]
        inputs += [penalties.repetition, penalties.presence, penalties.frequency]
    shared = {
        "VOCAB": vocab_size,
        "SPLITS": splits,
        "PER_SPLIT": split_size(vocab_size),
        "PENALTIES": penalties is not None,
    }
    _best_of_split[(batch_size, splits)](
        workspace.best,
        workspace.tokens,
        *inputs,
        **shared,
        BLOCK=1024,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    _choose[(batch_size,)](
        out,
        workspace.best,
        workspace.tokens,
        workspace.scaled,
        workspace.candidates,
        *inputs,
        **shared,
        BLOCK=4096,
        CANDIDATES=workspace.scaled.shape[1],
        PDL=pdl,
        num_warps=16,
        **launch_options(pdl),
    )
