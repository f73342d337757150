"""The state of rows as the host writes it, and how it changes logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution.rows import DeviceRows, bias_of, marks_of
from minisgl_backend.execution.sampling import Sampler, StepLogits
from minisgl_backend.kernels.sampling import sample
from minisgl_backend.kernels.sampling_rule import SPLITS
from minisgl_backend.kernels.sampling_table import IN_PROMPT, IS_STOP, ONCE, Samples
from minisgl_backend.kernels.sampling_workspace import SamplingWorkspace
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.plan import NO_TOKEN, Admission
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
        dummy_window_page=None,
        most_guesses=0,
        mtp_tokens=0,
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
    bias = bias_of(admission(0, params, [3, 4, 4], []), VOCAB_SIZE)
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
    assert bias_of(of_request, VOCAB_SIZE) is None


class Oracle:
    """A row's greedy token, found by counting its tokens one by one."""

    def __init__(self, of_row: Admission, prompt: list[int], output: list[int]):
        self.params = of_row.sampling
        self.prompt, self.output = prompt, list(output)
        self.num_sampled = len(output)

    def best(self, logits: list[float]) -> int:
        params, adjusted = self.params, []
        for token, logit in enumerate(logits):
            count = self.output.count(token)
            if params.has_penalties and (count or token in self.prompt):
                factor = params.repetition_penalty
                logit = logit / factor if logit > 0 else logit * factor
            logit -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
            logit += sum(value for biased, value in params.logit_bias if biased == token)
            is_early = self.num_sampled < params.min_tokens
            if is_early and token in params.stop_token_ids:
                logit = -np.inf
            adjusted.append(logit)
        return int(np.argmax(adjusted))


@pytest.mark.parametrize("seed", range(5))
def test_greedy_tokens_follow_what_each_request_asked_for(seed: int) -> None:
    """Rows are reused again and again, by new requests and by some that began elsewhere."""
    rng = np.random.default_rng(seed)
    device, oracles = CpuDevice(), dict[int, Oracle]()
    table = device_rows()
    sampler = Sampler(table.table, device, OneRank(), range(SPLITS), lambda logits: logits)
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
            oracles[row] = Oracle(admissions[-1], prompt, output)
            positions[row] = 5 + step % 3
        table.admit(admissions)
        sampler.admit(admissions)
        batch = rng.permutation(MAX_ROWS)[:8]
        logits = torch.from_numpy(rng.normal(size=(8, VOCAB_SIZE)).astype(np.float32)) * 3
        broken = int(rng.integers(8))
        logits[broken] = torch.nan  # that row counts nothing
        expected = [
            NO_TOKEN if index == broken else oracles[row].best(logits[index].tolist())
            for index, row in enumerate(batch.tolist())
        ]
        rows, at = torch.from_numpy(np.stack([batch, positions[batch]]).astype(np.int32))
        samples = Samples(rows, at, previous=rows)
        assert sampler.sample(StepLogits(logits, samples)).tokens.tolist() == expected
        for row, token in zip(batch.tolist(), expected, strict=True):
            oracles[row].output += [token] * (token != NO_TOKEN)
            oracles[row].num_sampled += 1
        positions[batch] += 1


@pytest.mark.parametrize("penalty", [1e-38, 3e38])
def test_no_penalty_breaks_logits(penalty: float) -> None:
    """The largest logit is chosen even if all are rewarded, or punished, excessively."""
    rows = device_rows()
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    rows.admit([admission(3, params, list(range(VOCAB_SIZE)), [])])
    logits = torch.linspace(-5, 9, VOCAB_SIZE)[None]
    samples = Samples(*torch.tensor([[3], [VOCAB_SIZE], [0]], dtype=torch.int32))
    workspace = SamplingWorkspace(1, VOCAB_SIZE, torch.device("cpu"))
    assert sample(logits, rows.table.sampling, samples, workspace).tolist() == [VOCAB_SIZE - 1]
