"""Two replicas, each on its own GPU: their tokens, and what a killed one takes with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import EngineFailure
from minisgl_backend.request import Request, SamplingParams
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_bench.dummy_model import write_dummy_model
from minisgl_check.processes import runs
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.gpu.test_executor import serve, shortfalls, tokens_of
from tests.parallel.engines import Answer, wait_for_all
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_tokens_of_two_replicas(tmp_path: Path) -> None:
    """In fp32, rounding moves only tokens that tie."""
    reference = write_checkpoint("qwen3", tmp_path).float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    sinks = serve(
        tmp_path, prompts, max_sequence_length=CONTEXT, dtype="float32", data_parallel_size=2
    )
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.02
    assert below.max() < 0.05


def test_a_killed_replica_takes_only_what_it_had_begun(tmp_path: Path) -> None:
    """Half of the requests wait at each replica when one is killed; it comes back on its GPU."""
    write_dummy_model("qwen3-0.6b", tmp_path)
    options = EngineOptions(
        model=str(tmp_path),
        load_format="dummy",
        device="cuda",
        data_parallel_size=2,
        num_pages=4096,
        max_running_requests=16,
        cuda_graph_batch_sizes="16",
    )
    engine = build_engine(options)
    try:
        answers = [submitted(engine, index, 400) for index in range(64)]
        for answer in answers[:2]:
            assert answer.started.wait(60)
        victim, other = (replica.pid for replica in engine.replicas())
        assert victim is not None and other is not None
        os.kill(victim, signal.SIGKILL)
        wait_for_all(answers)
        lost = [answer for answer in answers if answer.error is not None]
        assert 1 <= len(lost) <= 16  # the rows of one replica
        assert all(isinstance(answer.error, EngineFailure) for answer in lost)
        assert all(len(answer.tokens) == 400 for answer in answers if answer.error is None)
        wait_until(lambda: all(replica.is_up for replica in engine.replicas()))
        assert not runs(victim) and runs(other)
        routed = [replica.num_routed for replica in engine.replicas()]
        again = [submitted(engine, index, 20) for index in range(64)]
        wait_for_all(again)
        assert all(len(answer.tokens) == 20 for answer in again)
        now = [replica.num_routed for replica in engine.replicas()]
        assert all(after > before for after, before in zip(now, routed, strict=True))
    finally:
        engine.close(drain_s=0)


def submitted(engine: EngineBase, index: int, num_tokens: int) -> Answer:
    answer = Answer(engine.new_id())
    prompt = np.arange(index, index + 40, dtype=np.int32)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index)
    engine.submit(Request(id=answer.request_id, prompt=prompt, sampling=sampling), answer)
    return answer
