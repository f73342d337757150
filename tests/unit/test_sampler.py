"""The sampler against a row-by-row reference in plain Python, and its books of rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch
from minisgl_backend.execution.sampler import Sampler
from torch import Tensor

from minisgl_backend.plan import NO_TOKEN, Admission
from minisgl_backend.request import RequestId, SamplingParams, TokenLogprobs

VOCAB_SIZE: Final = 50
GREEDY: Final = SamplingParams(temperature=0.0)


def _sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(max_rows=64, vocab_size=vocab_size)


def _admit(
    sampler: Sampler,
    row: int,
    sampling: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
) -> None:
    history = np.array((*prompt, *output) if sampling.has_penalties else (), np.int32)
    sampler.admit(
        Admission(
            request_id=RequestId(row),
            row=row,
            num_prompt_tokens=len(prompt),
            num_cached_tokens=0,
            sampling=sampling,
            history=history,
        )
    )


def _sample(sampler: Sampler, logits: Tensor, rows: list[int], positions: list[int]) -> list[int]:
    tokens: list[int] = sampler.sample(logits, np.array(rows), np.array(positions)).tokens.tolist()
    return tokens


def _logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def _reference_logits(
    logits: list[float], params: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]
) -> list[float]:
    """Penalties, bias and masks, one token after the other."""
    counts = Counter(output)
    adjusted = list(logits)
    for token, logit in enumerate(logits):
        if token in prompt or token in counts:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * counts[token]
        logit -= params.presence_penalty * (token in counts)
        adjusted[token] = logit
    for token, bias in params.logit_bias:
        if 0 <= token < len(logits):
            adjusted[token] += bias
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            if 0 <= token < len(logits):
                adjusted[token] = -math.inf
    return adjusted


ADJUSTED: Final = [
    replace(GREEDY, repetition_penalty=1.8),
    replace(GREEDY, repetition_penalty=0.6),
    replace(GREEDY, presence_penalty=1.5),
    replace(GREEDY, frequency_penalty=-0.7),
    replace(GREEDY, repetition_penalty=1.3, presence_penalty=-1.0, frequency_penalty=0.9),
    replace(GREEDY, logit_bias=((7, 20.0), (8, -100.0), (9, 5.0))),
    replace(GREEDY, logit_bias=((VOCAB_SIZE, 100.0), (-1, 100.0), (3, 9.0))),
    replace(GREEDY, min_tokens=3, stop_token_ids=tuple(range(0, VOCAB_SIZE, 2))),
    replace(GREEDY, min_tokens=2, stop_token_ids=(VOCAB_SIZE + 5,)),
    replace(
        GREEDY,
        min_tokens=4,
        stop_token_ids=tuple(range(25)),
        logit_bias=((30, 4.0), (5, 50.0)),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
    ),
    GREEDY,
]


def test_penalties_bias_and_masks_equal_the_reference() -> None:
    """All rows are in one batch, over several steps, so that counts of the output matter."""
    sampler = _sampler()
    prompts = [tuple(range(row, row + 5)) for row in range(len(ADJUSTED))]
    outputs: list[tuple[int, ...]] = [(4, 4, 9)] * len(ADJUSTED)
    rows = list(range(len(ADJUSTED)))
    for row in rows:
        _admit(sampler, row, ADJUSTED[row], prompt=prompts[row], output=outputs[row])
    for step in range(12):
        logits = _logits(len(rows), seed=step)
        before = logits.clone()
        positions = [len(prompts[row]) + len(outputs[row]) for row in rows]
        tokens = _sample(sampler, logits, rows, positions)
        assert torch.equal(logits, before)
        for row in rows:
            wanted = _reference_logits(
                logits[row].tolist(), ADJUSTED[row], prompts[row], outputs[row]
            )
            assert tokens[row] == max(range(VOCAB_SIZE), key=lambda token: wanted[token])
            outputs[row] = (*outputs[row], tokens[row])


def test_stop_tokens_are_masked_until_min_tokens_and_no_longer() -> None:
    sampler = _sampler()
    _admit(sampler, 0, replace(GREEDY, min_tokens=2, stop_token_ids=(7,)), prompt=(1, 2, 3))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 8] = 2.0, 1.0
    tokens = [_sample(sampler, logits, [0], [position])[0] for position in (3, 4, 5, 6)]
    assert tokens == [8, 8, 7, 7]


RANDOM: Final = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.5),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, top_p=0.6, temperature=1.7),
    SamplingParams(seed=5, min_p=0.2),
    SamplingParams(seed=2**64 - 1, repetition_penalty=1.5, top_k=3),
    SamplingParams(seed=6, logit_bias=((4, 3.0),)),
    SamplingParams(seed=7, presence_penalty=1.0, min_tokens=9, stop_token_ids=(1, 2)),
    GREEDY,
]


def test_tokens_do_not_depend_on_the_batch() -> None:
    num_steps, vocab_size = 8, 400
    logits = [_logits(len(RANDOM), seed=step, vocab_size=vocab_size) for step in range(num_steps)]
    together, alone = _sampler(vocab_size), _sampler(vocab_size)
    rows = list(range(len(RANDOM)))
    for row in rows:
        _admit(together, row, RANDOM[row])
    in_batch = [
        _sample(together, logits[step], rows, [3 + step] * len(rows)) for step in range(num_steps)
    ]
    for row in rows:
        # Another row number, another moment, and no neighbours.
        _admit(alone, 40, RANDOM[row])
        tokens = [
            _sample(alone, logits[step][row : row + 1], [40], [3 + step])[0]
            for step in range(num_steps)
        ]
        assert tokens == [in_batch[step][row] for step in range(num_steps)]


def test_the_order_of_rows_does_not_matter() -> None:
    logits = _logits(len(RANDOM))
    tokens = []
    for order in (list(range(len(RANDOM))), list(reversed(range(len(RANDOM))))):
        sampler = _sampler()
        for row in order:
            _admit(sampler, row, RANDOM[row])
        sampled = _sample(sampler, logits[order], order, [3] * len(order))
        tokens.append(dict(zip(order, sampled, strict=True)))
    assert tokens[0] == tokens[1]


def test_a_retracted_request_goes_on_as_if_nothing_had_happened() -> None:
    params = SamplingParams(seed=9, frequency_penalty=0.8, repetition_penalty=1.2, temperature=0.7)
    logits = [_logits(1, seed=step) for step in range(10)]
    steady, moved = _sampler(), _sampler()
    _admit(steady, 0, params)
    _admit(moved, 0, params)
    expected = [_sample(steady, logits[step], [0], [3 + step])[0] for step in range(10)]
    tokens = [_sample(moved, logits[step], [0], [3 + step])[0] for step in range(4)]
    moved.release(0)
    _admit(moved, 5, params, output=tuple(tokens))
    tokens += [_sample(moved, logits[step], [5], [3 + step])[0] for step in range(4, 10)]
    assert tokens == expected


def test_a_row_forgets_its_former_request() -> None:
    sampler = _sampler()
    heavy = replace(
        GREEDY, frequency_penalty=2.0, logit_bias=((7, 50.0),), min_tokens=9, stop_token_ids=(3,)
    )
    logits = _logits(1)
    for output in ((), (7, 7)):
        _admit(sampler, 0, heavy, output=output)
        assert _sample(sampler, logits, [0], [3]) == [7]
        _admit(sampler, 0, GREEDY)  # with or without a release in between
        assert _sample(sampler, logits, [0], [3]) == [int(logits.argmax())]
        sampler.release(0)
        sampler.release(0)


def test_many_rows_with_penalties() -> None:
    sampler = _sampler()
    params = replace(GREEDY, presence_penalty=100.0)
    rows = list(range(40))
    for row in rows:
        _admit(sampler, row, params)
    logits = torch.arange(VOCAB_SIZE).float().repeat(40, 1)
    seen = [_sample(sampler, logits, rows, [3 + step] * 40) for step in range(3)]
    assert seen == [[49] * 40, [48] * 40, [47] * 40]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(params: SamplingParams, value: float) -> None:
    sampler = _sampler()
    for row in range(3):
        _admit(sampler, row, replace(params, frequency_penalty=0.5 * row))
    logits = _logits(3)
    healthy = _sample(sampler, logits, [0, 1, 2], [3] * 3)
    logits[1, 17] = value
    tokens = _sample(sampler, logits, [0, 1, 2], [3] * 3)
    assert tokens[1] == NO_TOKEN
    assert NO_TOKEN not in healthy and tokens[0] == healthy[0] and tokens[2] != NO_TOKEN


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampler = _sampler()
    logits = _logits(4)
    wanted = [None, 0, 3, VOCAB_SIZE + 7]
    for row, num_logprobs in enumerate(wanted):
        params = SamplingParams(
            seed=row, temperature=0.2, frequency_penalty=1.0, num_logprobs=num_logprobs
        )
        _admit(sampler, row, params)
    sample = sampler.sample(logits, np.arange(4), np.full(4, 3))
    assert sample.logprobs is not None
    tokens = sample.tokens.tolist()
    found = sample.logprobs.by_sample(sample.tokens.numpy().astype(np.int32))
    assert found.keys() == {1, 2, 3}
    for row, entry in found.items():
        logprobs = logits[row].double().log_softmax(dim=-1)
        ranked = logprobs.argsort(descending=True).tolist()
        count = min(wanted[row] or 0, VOCAB_SIZE)
        assert entry.logprob == pytest.approx(float(logprobs[tokens[row]]), abs=1e-5)
        assert entry.rank == ranked.index(tokens[row]) + 1
        assert [token for token, _ in entry.alternatives] == ranked[:count]
        values = [value for _, value in entry.alternatives]
        assert values == pytest.approx([float(logprobs[t]) for t in ranked[:count]], abs=1e-5)


def test_the_least_temperatures_are_greedy() -> None:
    sampler = _sampler()
    logits = _logits(1)
    for temperature in (1e-300, 1e-46, 1e-40, 1e-20, 9e-6, -0.0):
        params = SamplingParams(temperature=temperature)
        assert str(params.temperature) == "0.0"  # so that no device divides by it
        _admit(sampler, 0, params)
        assert _sample(sampler, logits, [0], [3]) == [int(logits.argmax())]


def test_logprobs_of_a_row_without_a_token_are_left_out() -> None:
    sampler = _sampler()
    for row in range(2):
        _admit(sampler, row, replace(GREEDY, num_logprobs=2))
    logits = _logits(2)
    logits[0, 0] = math.nan
    sample = sampler.sample(logits, np.arange(2), np.full(2, 3))
    assert sample.logprobs is not None
    found = sample.logprobs.by_sample(sample.tokens.numpy().astype(np.int32))
    assert found.keys() == {1} and isinstance(found[1], TokenLogprobs)


def test_no_logprobs_where_none_were_asked_for() -> None:
    sampler = _sampler()
    _admit(sampler, 0, GREEDY)
    assert sampler.sample(_logits(1), np.array([0]), np.array([3])).logprobs is None
