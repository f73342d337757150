"""Two GPUs against one model on a CPU, and against themselves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend.errors import EngineFailure
from minisgl_backend.request import IntArray, SamplingParams
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.gpu.test_executor import serve, shortfalls, tokens_of
from tests.parallel.engines import ranked_engine, wait_for_all

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[IntArray]:
    return prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)


@pytest.mark.parametrize("comm", ["nccl", "pynccl"])
@pytest.mark.parametrize("case", ["llama-biases", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("graphs", [0, None], ids=["eager", "graphs"])
def test_tokens_of_two_gpus(
    case: str, comm: str, graphs: int | None, prompts: list[IntArray], tmp_path: Path
) -> None:
    reference = write_checkpoint(case, tmp_path).float()
    sinks = serve(
        tmp_path,
        prompts,
        max_sequence_length=CONTEXT,
        dtype="float32",
        tensor_parallel_size=2,
        comm=comm,
        cuda_graph_max_batch_size=graphs,
    )
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.02
    assert below.max() < 0.05


@pytest.mark.parametrize("comm", ["nccl", "pynccl"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_what_waits_on_the_gpu(comm: str, number: signal.Signals) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": None,
        "comm": comm,
        "distributed_timeout_s": 3,
    }
    with ranked_engine(2, **options) as ranked:
        prompt = np.arange(40, dtype=np.int32)
        answers = [ranked.submit(prompt + index, ENDLESS) for index in range(4)]
        for answer in answers:
            assert answer.started.wait(120)
        assert ranked.followers is not None
        os.kill(ranked.followers.pids[0], number)
        wait_for_all(answers)
        assert all(isinstance(answer.error, EngineFailure) for answer in answers)
