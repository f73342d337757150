"""Attention over pages that also runs on a CPU, held to the same checks as GPU backends."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from minisgl_backend.attention import choose
from tests.gpu.paged import Case, Decoding, Prompts, assert_tokens_close

CPU = torch.device("cpu")
CASES = [
    *(Case(*of) for of in product((1, 16), (1, 4, 5), (64,), (None, 50))),
    *(Case(16, group, 64, fp8=True) for group in (1, 8)),
    *(Case(size, 5, 64, window=64, sections=True) for size in (1, 16, 64)),
]


@pytest.fixture(params=["sdpa", "triton"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reference, and the twins of this package's kernels."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    return str(request.param)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ragged_chunks_and_extensions(name: str, case: Case) -> None:
    torch.manual_seed(0)
    prompts = Prompts.of(case.setting(torch.float32, CPU))
    backend = choose.choose_attention(name, prompts.paged.setting)
    assert_tokens_close(prompts.attend(backend), prompts.expected(), limit=1e-5)


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_chunks_of_captured_steps(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    prompts = Prompts.of(case.setting(torch.float32, CPU))
    between = torch.randn_like(prompts.q[:13])
    out = prompts.attend_as_captured(
        choose.choose_attention("triton", prompts.paged.setting), between
    )
    assert torch.equal(out[:13], between)
    assert torch.equal(out[-13:], between)
    assert_tokens_close(out[13:-13], prompts.expected(), limit=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(name: str, case: Case) -> None:
    torch.manual_seed(0)
    step = Decoding(case.setting(torch.float32, CPU), 9)
    backend = choose.choose_attention(name, step.paged.setting)
    inputs = step.inputs(seed=0)
    step.take(inputs)
    out = step.attend(backend, inputs.host_lengths)
    assert_tokens_close(out, step.expected(inputs), limit=1e-5)
