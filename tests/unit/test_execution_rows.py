"""Rows of a GPU, as the host writes them, beside the sampler of a CPU: they adjust logits alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.sampler import Sampler
from minisgl_backend.execution.sampling_lines import bias_of, marks_of
from minisgl_backend.kernels.rows import keep_sampled
from minisgl_backend.kernels.sampling import SamplingWorkspace, sample
from minisgl_backend.kernels.sampling_table import IN_PROMPT, IS_STOP, ONCE
from minisgl_backend.plan import Admission
from minisgl_backend.request import RequestId, SamplingParams

VOCAB_SIZE = 40
MAX_ROWS = 12
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "presence_penalty": 0.6,
    "frequency_penalty": -0.8,
}


def admission(
    row: int, sampling: SamplingParams, prompt: list[int], output: list[int]
) -> Admission:
    history = [*prompt, *output] if sampling.has_penalties else []
    return Admission(
        request_id=RequestId(row),
        row=row,
        num_prompt_tokens=len(prompt),
        num_cached_tokens=0,
        sampling=sampling,
        history=np.array(history, np.int32),
    )


def device_rows() -> DeviceRows:
    return DeviceRows(
        CpuDevice(),
        max_rows=MAX_ROWS,
        max_sequence_length=64,
        page_size=4,
        dummy_page=0,
        vocab_size=VOCAB_SIZE,
    )


def test_lines_of_a_request() -> None:
    params = SamplingParams(
        **PENALTIES,
        min_tokens=2,
        stop_token_ids=(3, 9, 9, VOCAB_SIZE + 1, -1),
        logit_bias=((5, 1.5), (2, -1.0), (5, 0.25), (VOCAB_SIZE, 4.0), (-1, 4.0)),
    )
    marks = marks_of(admission(0, params, [3, 4, 4], [4, 6, 6]), VOCAB_SIZE)
    assert marks is not None
    assert dict(zip(*(part.tolist() for part in marks), strict=True)) == {
        3: IN_PROMPT + IS_STOP,
        4: IN_PROMPT + ONCE,
        6: 2 * ONCE,
        9: IS_STOP,
    }
    bias = bias_of(params, VOCAB_SIZE)
    assert bias is not None
    assert dict(zip(*(part.tolist() for part in bias), strict=True)) == {2: -1.0, 5: 1.75}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=(3,)),  # nothing to hold back
        SamplingParams(min_tokens=4),
        SamplingParams(logit_bias=((VOCAB_SIZE, 4.0),)),
    ],
)
def test_most_requests_have_no_lines(params: SamplingParams) -> None:
    of_request = admission(0, params, [3, 4], [])
    assert marks_of(of_request, VOCAB_SIZE) is None
    assert bias_of(params, VOCAB_SIZE) is None


@pytest.mark.parametrize("seed", range(5))
def test_greedy_tokens_are_those_of_the_sampler(seed: int) -> None:
    """Rows are taken again and again, by new requests and by those that have begun elsewhere."""
    rng = np.random.default_rng(seed)
    rows, sampler = (
        device_rows(),
        Sampler(max_rows=MAX_ROWS, vocab_size=VOCAB_SIZE),
    )
    workspace = SamplingWorkspace(MAX_ROWS, VOCAB_SIZE, torch.device("cpu"))
    positions = np.zeros(MAX_ROWS, np.int64)
    for step in range(12):
        admitted = range(MAX_ROWS) if step == 0 else rng.choice(MAX_ROWS, 3, replace=False).tolist()
        admissions = []
        for row in admitted:
            asked: dict[str, Any] = dict(PENALTIES) if rng.random() < 0.6 else {}
            if rng.random() < 0.4:
                stops = rng.choice(VOCAB_SIZE, 20, replace=False)
                asked |= {"min_tokens": 4, "stop_token_ids": tuple(stops.tolist())}
            if rng.random() < 0.4:
                asked["logit_bias"] = tuple((int(t), 3.0) for t in rng.integers(0, VOCAB_SIZE, 4))
            params = SamplingParams(temperature=0.0, max_tokens=99, **asked)
            prompt, output = (rng.integers(0, VOCAB_SIZE, n).tolist() for n in (5, step % 3))
            admissions.append(admission(row, params, prompt, output))
            positions[row] = 5 + step % 3
        rows.admit(admissions)
        for of_row in admissions:
            sampler.admit(of_row)
        batch = rng.permutation(MAX_ROWS)[:8]
        logits = torch.from_numpy(rng.normal(size=(8, VOCAB_SIZE)).astype(np.float32)) * 3
        logits[rng.integers(8)] = torch.nan  # that row counts nothing
        expected = sampler.sample(logits, batch, positions[batch]).tokens.int()
        of_batch, at = torch.from_numpy(np.stack([batch, positions[batch]]).astype(np.int32))
        tokens = sample(logits, rows.table.sampling, of_batch, at, workspace)
        assert torch.equal(tokens, expected)
        keep_sampled(rows.table, of_batch, at, tokens)
        positions[batch] += 1


@pytest.mark.parametrize("penalty", [1e-38, 3e38])
def test_no_penalty_breaks_logits(penalty: float) -> None:
    """The largest is chosen where all of them are rewarded, or punished, out of measure."""
    rows = device_rows()
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    rows.admit([admission(3, params, list(range(VOCAB_SIZE)), [])])
    logits = torch.linspace(-5, 9, VOCAB_SIZE)[None]
    of_batch, at = torch.tensor([[3], [VOCAB_SIZE]], dtype=torch.int32)
    workspace = SamplingWorkspace(1, VOCAB_SIZE, torch.device("cpu"))
    assert sample(logits, rows.table.sampling, of_batch, at, workspace).tolist() == [VOCAB_SIZE - 1]
