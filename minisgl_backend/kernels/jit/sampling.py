"""Sampling in two launches: splits of each row in parallel, then a program per row.

The first finds the best score of each split, of logits or of noisy ones, or for rows with filters
the largest logit. The second takes the best split; for rows with filters it searches the threshold
among the bit patterns of the weights, which order as the weights do (they are not negative): first
over all tokens, until few enough candidates are left to be written down, then among these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from minisgl_backend.kernels.jit.noise import gumbel, noise_key
from minisgl_backend.kernels.jit.pdl import allow_next, launch_options, wait_previous

if TYPE_CHECKING:
    from minisgl_backend.kernels.sampling import Penalties, RowParameters, SamplingWorkspace

_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0, the largest weight


@triton.jit
def _load(
    logits_ptr,
    at,
    mask,
    line,
    counts_ptr,
    in_prompt_ptr,
    repetition,
    presence,
    frequency,
    VOCAB: tl.constexpr,
    PENALTIES: tl.constexpr,
):
    """float32 logits of one row, after penalties; -inf outside of ``mask``."""
    x = tl.load(logits_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    if PENALTIES:  # noqa: SIM102  (known when compiled, the line only when run)
        if line >= 0:
            count = tl.load(counts_ptr + line * VOCAB + at, mask=mask, other=0).to(tl.float32)
            in_prompt = tl.load(in_prompt_ptr + line * VOCAB + at, mask=mask, other=0) != 0
            seen = in_prompt | (count > 0)
            x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * count - presence * tl.where(count > 0, 1.0, 0.0)
    return x


@triton.jit
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
    key = noise_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    line = tl.full([], -1, tl.int64)
    repetition = 1.0
    presence = 0.0
    frequency = 0.0
    if PENALTIES:
        line = tl.load(lines_ptr + row).to(tl.int64)
        repetition = tl.load(repetition_ptr + row)
        presence = tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)

    PER_SPLIT: tl.constexpr = (VOCAB + SPLITS - 1) // SPLITS
    begin = split * PER_SPLIT
    end = tl.minimum(begin + PER_SPLIT, VOCAB)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    token = tl.full([BLOCK], VOCAB, tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(begin, end, BLOCK, num_stages=2):
        at = start + tl.arange(0, BLOCK)
        x = _load(
            logits_ptr + row * stride,
            at,
            at < end,
            line,
            counts_ptr,
            in_prompt_ptr,
            repetition,
            presence,
            frequency,
            VOCAB,
            PENALTIES,
        )
        broken |= ((x != x) | (x == float("inf"))).to(tl.int32)
        if noisy:
            x = x / temperature + gumbel(key, at)
        better = x > best
        best = tl.where(better, x, best)
        token = tl.where(better, at, token)
    top = tl.max(best, axis=0)
    # the least token among equals
    token = tl.min(tl.where(best == top, token, VOCAB), axis=0)
    if tl.max(broken, axis=0) > 0:
        top = float("inf")
    tl.store(best_ptr + row * SPLITS + split, top)
    tl.store(token_ptr + row * SPLITS + split, token)


@triton.jit
def _choose(
    out_ptr,
    best_ptr,
    token_ptr,
    weights_ptr,
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
    if (temperature == 0) | (filtered == 0) | (finite == 0):
        tl.store(out_ptr + row, tl.where(finite, token, -1))
        return

    line = tl.full([], -1, tl.int64)
    repetition = 1.0
    presence = 0.0
    frequency = 0.0
    if PENALTIES:
        line = tl.load(lines_ptr + row).to(tl.int64)
        repetition = tl.load(repetition_ptr + row)
        presence = tl.load(presence_ptr + row)
        frequency = tl.load(frequency_ptr + row)
    row_ptr = logits_ptr + row * stride
    i = tl.arange(0, BLOCK)

    # Over all tokens, by count where top_k is on, else by weight: low passes the target and high
    # does not. Where both are on, top_p is left to the candidates; its share is one of all that
    # top_k keeps, so min_p must not drop any of these yet.
    floor = tl.minimum(min_p, 1.0).to(tl.int32, bitcast=True)
    low = tl.where((top_k > 0) & (top_p < 1), 0, tl.maximum(floor, 0))
    high = tl.full([], _ONE + 1, tl.int32)
    target = top_k.to(tl.float32)
    by_count = top_k > 0
    total = 0.0
    count = 0.0
    # what the floor alone lets through, and the weight of all
    for start in tl.range(0, VOCAB, BLOCK, num_stages=2):
        at = start + i
        x = _load(
            row_ptr,
            at,
            at < VOCAB,
            line,
            counts_ptr,
            in_prompt_ptr,
            repetition,
            presence,
            frequency,
            VOCAB,
            PENALTIES,
        )
        w = tl.exp((x - best) / temperature)
        total += tl.sum(w, axis=0)
        passes = (w.to(tl.int32, bitcast=True) >= low) & (at < VOCAB)
        count += tl.sum(passes.to(tl.float32), axis=0)
    mass_target = top_p * total
    searches = 1
    while searches > 0:
        if by_count == 0:
            target = mass_target
        while (high - low > 1) & (count > CANDIDATES):
            step = tl.maximum((high - low) // 4, 1)
            a = low + step
            b = tl.minimum(a + step, high)
            c = tl.minimum(b + step, high)
            count_a, count_b, count_c = 0.0, 0.0, 0.0
            mass_a, mass_b, mass_c = 0.0, 0.0, 0.0
            for start in tl.range(0, VOCAB, BLOCK, num_stages=2):
                at = start + i
                x = _load(
                    row_ptr,
                    at,
                    at < VOCAB,
                    line,
                    counts_ptr,
                    in_prompt_ptr,
                    repetition,
                    presence,
                    frequency,
                    VOCAB,
                    PENALTIES,
                )
                w = tl.exp((x - best) / temperature)
                bits = w.to(tl.int32, bitcast=True)
                count_a += tl.sum((bits >= a).to(tl.float32), axis=0)
                count_b += tl.sum((bits >= b).to(tl.float32), axis=0)
                count_c += tl.sum((bits >= c).to(tl.float32), axis=0)
                mass_a += tl.sum(tl.where(bits >= a, w, 0.0), axis=0)
                mass_b += tl.sum(tl.where(bits >= b, w, 0.0), axis=0)
                mass_c += tl.sum(tl.where(bits >= c, w, 0.0), axis=0)
            reached_a = tl.where(by_count, count_a, mass_a) >= target
            reached_b = tl.where(by_count, count_b, mass_b) >= target
            reached_c = tl.where(by_count, count_c, mass_c) >= target
            if reached_c & (c < high):
                low, count = c, count_c
            elif reached_b & (b < high):
                low, count, high = b, count_b, c
            elif reached_a:
                low, count, high = a, count_a, b
            else:
                high = a
        searches = 0
        if by_count & (count > CANDIDATES) & (top_p < 1):
            # more tie at the k-th place than there is room for: search on by weight from there
            by_count = top_k < 0
            high = tl.full([], _ONE + 1, tl.int32)
            kept = 0.0
            for start in tl.range(0, VOCAB, BLOCK, num_stages=2):
                at = start + i
                x = _load(
                    row_ptr,
                    at,
                    at < VOCAB,
                    line,
                    counts_ptr,
                    in_prompt_ptr,
                    repetition,
                    presence,
                    frequency,
                    VOCAB,
                    PENALTIES,
                )
                w = tl.exp((x - best) / temperature)
                kept += tl.sum(tl.where(w.to(tl.int32, bitcast=True) >= low, w, 0.0), axis=0)
            mass_target = top_p * kept
            searches = 1
    key = noise_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))

    if count > CANDIDATES:
        # low is the threshold itself
        low = tl.maximum(low, floor)
        best_score = tl.full([BLOCK], float("-inf"), tl.float32)
        chosen = tl.full([BLOCK], VOCAB, tl.int32)
        for start in tl.range(0, VOCAB, BLOCK, num_stages=2):
            at = start + i
            x = _load(
                row_ptr,
                at,
                at < VOCAB,
                line,
                counts_ptr,
                in_prompt_ptr,
                repetition,
                presence,
                frequency,
                VOCAB,
                PENALTIES,
            )
            scaled = (x - best) / temperature
            bits = tl.exp(scaled).to(tl.int32, bitcast=True)
            score = tl.where(bits >= low, scaled + gumbel(key, at), float("-inf"))
            better = score > best_score
            best_score = tl.where(better, score, best_score)
            chosen = tl.where(better, at, chosen)
        top = tl.max(best_score, axis=0)
        tl.store(out_ptr + row, tl.min(tl.where(best_score == top, chosen, VOCAB), axis=0))
        return

    written = 0
    for start in tl.range(0, VOCAB, BLOCK, num_stages=2):
        at = start + i
        x = _load(
            row_ptr,
            at,
            at < VOCAB,
            line,
            counts_ptr,
            in_prompt_ptr,
            repetition,
            presence,
            frequency,
            VOCAB,
            PENALTIES,
        )
        scaled = (x - best) / temperature
        passes = (tl.exp(scaled).to(tl.int32, bitcast=True) >= low) & (at < VOCAB)
        place = written + tl.cumsum(passes.to(tl.int32), axis=0) - 1
        tl.store(weights_ptr + row * CANDIDATES + place, scaled, mask=passes)
        tl.store(candidates_ptr + row * CANDIDATES + place, at, mask=passes)
        written += tl.sum(passes.to(tl.int32), axis=0)
    tl.debug_barrier()
    c = tl.arange(0, CANDIDATES)
    at = tl.load(candidates_ptr + row * CANDIDATES + c, mask=c < written, other=0)
    scaled = tl.load(weights_ptr + row * CANDIDATES + c, mask=c < written, other=float("-inf"))
    w = tl.exp(scaled)
    bits = tl.where(c < written, w.to(tl.int32, bitcast=True), -1)
    if by_count:
        high = tl.full([], _ONE + 1, tl.int32)
        while high - low > 1:
            middle = (low + high) // 2
            if tl.sum((bits >= middle).to(tl.int32), axis=0) >= top_k:
                low = middle
            else:
                high = middle
        mass_target = top_p * tl.sum(tl.where(bits >= low, w, 0.0), axis=0)
    if top_p < 1:
        high = tl.full([], _ONE + 1, tl.int32)
        while high - low > 1:
            middle = (low + high) // 2
            if tl.sum(tl.where(bits >= middle, w, 0.0), axis=0) >= mass_target:
                low = middle
            else:
                high = middle
    low = tl.maximum(low, floor)
    score = tl.where(bits >= low, scaled + gumbel(key, at), float("-inf"))
    top = tl.max(score, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(score == top, at, VOCAB), axis=0))


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
    shared = {"VOCAB": vocab_size, "SPLITS": splits, "PENALTIES": penalties is not None}
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
        workspace.weights,
        workspace.candidates,
        *inputs,
        **shared,
        BLOCK=4096,
        CANDIDATES=workspace.weights.shape[1],
        PDL=pdl,
        num_warps=16,
        **launch_options(pdl),
    )
