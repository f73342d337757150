"""Two GPUs against one model on a CPU, and against themselves."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import EngineFailure
from minisgl_backend.kernels.experts import ExpertWeights, fused_experts, fused_experts_reference
from minisgl_backend.kernels.rms_norm import fused_add_rms_norm
from minisgl_backend.kernels.routing import Choices
from minisgl_backend.parallel.connect import connect, open_store
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_bench.dummy_model import write_dummy_model
from minisgl_check.machines import OtherNode, free_port
from tests.conformance.checkpoints import (
    CONTEXT,
    VOCAB_SIZE,
    write_broad_checkpoint,
    write_checkpoint,
)
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.gpu.compare import assert_close
from tests.gpu.test_executor import assert_good_in_bf16, serve, shortfalls, tokens_of
from tests.parallel.engines import ranked_engine, wait_for_all

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)
COMMS = ["nccl", "pynccl", "cuda"]
START_S = 60.0


# --- groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("size", [2, 4], ids="{} GPUs".format)
def test_collectives_eager_and_captured(size: int, comm: str) -> None:
    """Each rank is a process, which reports what it finds wrong."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    place, store = open_store(RankPlace.first(size, None), START_S)
    processes = multiprocessing.get_context("spawn")
    ranks = [processes.Process(target=check_rank, args=(rank, place, comm)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    try:
        for rank in ranks:
            rank.join(START_S)
        assert [rank.exitcode for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    del store


def check_rank(rank: int, first: RankPlace, comm: str) -> None:
    """The work of one rank; the test's own process holds the store."""
    place = first.of(rank)
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    stream = torch.cuda.Stream(device)
    store = TCPStore(place.host, place.port, is_master=False)
    group = connect(place, store, comm, device, timeout_s=START_S)
    with torch.cuda.stream(stream), torch.inference_mode():
        check_collectives(group, device)
        if comm == "cuda":
            check_fused_sums(group, device)
            check_rows_of_any_number(group, device)
    group.leave(patience_s=START_S)


def check_collectives(group: Group, device: torch.device) -> None:
    """Sums, gathers and broadcasts of several sizes; then the same in a graph, several times."""
    for num_rows, dtype in ((1, torch.bfloat16), (64, torch.bfloat16), (256, torch.float32)):
        mine = torch.full((num_rows, 5120), group.rank + 1.0, device=device, dtype=dtype)
        of_first = torch.full_like(mine, 1.0)
        joined = torch.stack([of_first * (rank + 1) for rank in range(group.size)])

        def work(mine: torch.Tensor = mine) -> list[torch.Tensor]:
            return [
                group.all_reduce(mine.clone()),
                group.all_gather(mine),
                group.broadcast(mine.clone()),
            ]

        expected = [joined.sum(dim=0), joined, of_first]
        for found in (work(), *replays(work, times=3)):
            for one, wanted in zip(found, expected, strict=True):
                assert torch.equal(one, wanted)


def check_fused_sums(group: Group, device: torch.device) -> None:
    """Against the same in steps; sizes change, since later calls clear what one call leaves.

    Zeros of either sign are among the summands.
    """
    fused = group.fused
    assert fused is not None
    torch.manual_seed(group.rank)
    for _ in range(3):
        for num_rows, hidden_size in ((1, 5120), (256, 5120), (3, 512), (40, 2048), (1, 1024)):
            assert fused.fits(num_rows, hidden_size, torch.bfloat16)
            x = torch.randn(num_rows, hidden_size, device=device).bfloat16()
            x[:, ::3] = 0.0
            x[:, 1::7] = -0.0
            residual = group.broadcast(torch.randn_like(x))
            weight = group.broadcast(torch.randn(hidden_size, device=device).bfloat16())
            total = residual.clone()
            expected = fused_add_rms_norm(group.all_reduce(x.clone()), total, weight, 1e-6)

            for pdl in (False, True):

                def work(
                    x: torch.Tensor = x,
                    residual: torch.Tensor = residual,
                    w: torch.Tensor = weight,
                    pdl: bool = pdl,
                ) -> list[torch.Tensor]:
                    stream = residual.clone()
                    return [fused.add_rms_norm(x, stream, w, 1e-6, pdl=pdl), stream]

                for found in (work(), *replays(work, times=4)):
                    assert_close(found[0], expected)
                    assert_close(found[1], total)
    assert not fused.fits(1, 5120, torch.float32)


def check_rows_of_any_number(group: Group, device: torch.device) -> None:
    """Rows get the same bits one by one, and among so many that sums are sent in parts."""
    fused = group.fused
    assert fused is not None
    torch.manual_seed(group.rank)
    for num_rows, hidden_size, dtype in (
        (7, 2880, torch.bfloat16),
        (250, 2880, torch.float16),
        (259, 5120, torch.bfloat16),
        (7001, 5120, torch.bfloat16),
        (130, 8192, torch.bfloat16),
    ):
        assert fused.fits(num_rows, hidden_size, dtype)
        x = torch.randn(num_rows, hidden_size, device=device).to(dtype)
        residual = group.broadcast(torch.randn_like(x))
        weight = group.broadcast(torch.randn(hidden_size, device=device).to(dtype))
        total = residual.clone()
        together = fused.add_rms_norm(x, total, weight, 1e-6)
        parts = group.all_gather(x).float()
        summed = parts[0]
        for part in parts[1:]:
            summed = summed + part
        assert torch.equal(total, (summed.to(dtype) + residual))
        for row in {0, 1, num_rows // 2, num_rows - 1}:
            stream = residual[row : row + 1].clone()
            alone = fused.add_rms_norm(x[row : row + 1], stream, weight, 1e-6)
            assert torch.equal(stream[0], total[row])
            assert torch.equal(alone[0], together[row])


def replays(work: Any, *, times: int) -> list[list[torch.Tensor]]:
    """The results of a graph of ``work`` each time; the graph is gone when this returns."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        output = work()
    found = []
    for _ in range(times):
        graph.replay()
        found.append([one.clone() for one in output])
    stream.synchronize()
    return found


# --- engines ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def return_memory() -> None:
    """Ranks are refused if their free memory differs, and rank 0 is in this process."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def prompts() -> list[IntArray]:
    return prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)


@pytest.mark.parametrize(
    ("case", "comm", "graphs"),
    [
        ("qwen3", "nccl", 0),
        ("qwen3-moe", "nccl", None),
        ("llama-biases", "pynccl", None),
    ],
)
def test_tokens_of_two_gpus(
    case: str, comm: str, graphs: int | None, prompts: list[IntArray], tmp_path: Path
) -> None:
    """In fp32, rounding moves only tokens that tie."""
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


@pytest.mark.parametrize("graphs", [0, None], ids=["launched", "captured"])
def test_random_tokens_of_two_gpus(
    graphs: int | None, prompts: list[IntArray], tmp_path: Path
) -> None:
    """In fp32 they are those of one GPU, except draws that nearly tie: for requests that all ranks
    sample, for those that rank 0 samples, and for both in one step."""
    write_checkpoint("qwen3", tmp_path)
    plain = SamplingParams(max_tokens=24, temperature=0.9, ignore_eos=True)
    filtered = replace(plain, max_tokens=12, top_k=20, top_p=0.9, num_logprobs=1)
    sampling = [
        replace(filtered if index % 4 == 3 else plain, seed=index) for index in range(len(prompts))
    ]
    of_two, of_one = (
        tokens_of(
            serve(
                tmp_path,
                prompts,
                sampling,
                max_sequence_length=CONTEXT,
                dtype="float32",
                tensor_parallel_size=ranks,
                cuda_graph_max_batch_size=graphs,
            )
        )
        for ranks in (2, 1)
    )
    equal = [one == other for one, other in zip(of_one, of_two, strict=True)]
    assert np.mean(equal) > 0.8


@pytest.mark.parametrize("comm", COMMS)
def test_tokens_of_broad_layers_in_bf16(comm: str, prompts: list[IntArray], tmp_path: Path) -> None:
    """Wide enough for fused sums; batches of any size up to 16."""
    reference = write_broad_checkpoint(tmp_path).bfloat16().float()
    sinks = serve(tmp_path, prompts, max_sequence_length=CONTEXT, tensor_parallel_size=2, comm=comm)
    assert_good_in_bf16(reference, prompts, tokens_of(sinks))


@pytest.mark.parametrize("size", [2, 4, 8], ids="{} GPUs".format)
def test_tokens_of_the_demo_model(size: int) -> None:
    """As on one GPU, up to the point where the two best tokens nearly tie."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    vocab_size = reference.config.vocab_size
    prompts = prompts_with_shared_prefixes(vocab_size=vocab_size, longest=110, seed=7)
    of_all, of_one = (
        tokens_of(serve(DEMO_MODEL, prompts, dtype="float32", tensor_parallel_size=ranks))
        for ranks in (size, 1)
    )
    for prompt, one, other in zip(prompts, of_one, of_all, strict=True):
        differing = np.flatnonzero(np.array(one) != np.array(other))
        if len(differing):
            first = differing[0]
            below = [
                shortfalls(reference, [prompt], [tokens[: first + 1]])[-1]
                for tokens in (one, other)
            ]
            assert max(below) < 0.05


def test_tokens_of_two_nodes(prompts: list[IntArray], tmp_path: Path) -> None:
    """Each has one of the GPUs; they meet as machines do."""
    reference = write_checkpoint("qwen3", tmp_path).float()
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    other = OtherNode(address, f"--model={tmp_path}", environment={"CUDA_VISIBLE_DEVICES": "1"})
    try:
        sinks = serve(
            tmp_path,
            prompts,
            max_sequence_length=CONTEXT,
            dtype="float32",
            tensor_parallel_size=2,
            nnodes=2,
            rendezvous=address,
        )
    finally:
        other.close()
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.02
    assert below.max() < 0.05


def test_tokens_of_experts_one_by_one(prompts: list[IntArray], tmp_path: Path) -> None:
    reference = write_checkpoint("qwen3-moe", tmp_path).float()
    sinks = serve(
        tmp_path,
        prompts,
        max_sequence_length=CONTEXT,
        dtype="float32",
        tensor_parallel_size=2,
        moe_backend="torch",
        cuda_graph_max_batch_size=0,
    )
    below = np.array(shortfalls(reference, prompts, tokens_of(sinks)))
    assert np.mean(below > 0) < 0.02
    assert below.max() < 0.05


@pytest.mark.parametrize("num_tokens", [1, 64, 300])
@pytest.mark.parametrize("size", [1, 2, 4], ids="of {}".format)
def test_experts_of_a_rank(device: torch.device, num_tokens: int, size: int) -> None:
    """A rank's share of the experts of the published 30B model: 768 features, 384 or 192."""
    num_experts, top_k, hidden_size, share = 128, 8, 2048, 768 // size
    x = torch.randn(num_tokens, hidden_size, device=device).bfloat16()
    gate_up = torch.randn(num_experts, 2 * share, hidden_size, device=device) * 0.02
    down = torch.randn(num_experts, hidden_size, share, device=device) * 0.02
    gate_up, down = gate_up.bfloat16(), down.bfloat16()
    scores = torch.randn(num_tokens, num_experts, device=device).softmax(dim=-1)
    weights, ids = scores.topk(top_k, dim=-1)
    experts, choices = ExpertWeights(gate_up, down), Choices(ids, weights)
    expected = fused_experts_reference(x, experts, choices)
    found = fused_experts(x, experts, choices)
    assert_close(found, expected, tolerance=1.5e-2)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_lost_rank_ends_what_waits_on_the_gpu(
    size: int, comm: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The last tests of this module: a GPU may be unusable after a peer's memory went away."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    write_dummy_model("qwen3-0.6b", tmp_path)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "device": "cuda",
        "dtype": "bfloat16",
        "comm": comm,
        "num_pages": 4096,
        "cuda_graph_batch_sizes": "4",
        "distributed_timeout_s": 3,
    }
    with ranked_engine(size, tmp_path, **options) as ranked:
        prompt = np.arange(40, dtype=np.int32)
        answers = [ranked.submit(prompt + index, ENDLESS) for index in range(4)]
        for answer in answers:
            assert answer.started.wait(120)
        ranked.kill(size - 1, number)
        wait_for_all(answers)
        assert all(isinstance(answer.error, EngineFailure) for answer in answers)
