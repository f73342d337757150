"""Pages of a GPU in main memory: they return as they were, and prefixes with them."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.execution.host_pages import HostPages
from minisgl_backend.execution.host_slots import HostSlots
from minisgl_backend.execution.host_states import HostStates
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.models.recurrent_spec import RecurrentSpec
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_backend.scheduling.report import SchedulerStats
from minisgl_bench.dummy_model import SHAPES as DUMMY_SHAPES
from minisgl_bench.dummy_model import write_dummy_model
from minisgl_bench.engines import submitted
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.conformance.mtp_checkpoints import write_mtp_checkpoint
from tests.gpu.test_executor import GREEDY, shortfalls
from tests.unit.execution.test_host_pages import SHAPES, contents, copies
from tests.unit.execution.test_host_states import SHAPES as STATES
from tests.unit.execution.test_host_states import contents as contents_of
from tests.unit.execution.test_host_states import states, storage_of

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

NUM_ROUNDS = 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_pages_return_as_they_were(shape: AttentionShape, dtype: torch.dtype) -> None:
    """A captured graph that reads pages reads what is there each time it is replayed."""
    device, num_pages = CudaDevice(), 300
    storage = KVStorage(
        shape, num_pages=num_pages, page_size=16, dtype=dtype, device=device.torch_device
    )
    for pages in [*storage.pages, *([] if storage.index_keys is None else [storage.index_keys])]:
        pages.copy_(torch.randn(pages.shape).to(dtype))
    before = [it.cpu() for it in contents(storage)]
    host = HostPages(storage, device, num_slots=200)
    assert host._slots.is_pinned()
    device.catch_up()
    raw = storage.pages[0].view(torch.uint8)
    first = device.submit(lambda: raw[:, :, 0].clone()).result()
    graph = device.submit(lambda: device.capture(lambda: raw[:, :, 0].clone())).result()
    slots = np.random.default_rng(0).permutation(200)
    saved = [(page, int(slot)) for page, slot in enumerate(slots)]
    seen: list[Tensor] = []

    def see() -> None:
        graph.replay()
        seen.append(graph.output.clone())

    def steps() -> None:
        see()
        host.save(*copies(*saved))
        storage.clear(torch.arange(200, device=device.torch_device))
        see()
        host.load(*copies(*saved[:150]))
        host.load(*copies((250, int(slots[160]))))
        see()

    device.submit(steps).result()
    assert torch.equal(seen[0], first) and torch.equal(seen[2], first)
    assert not seen[1].any()
    for was, found in zip(before, contents(storage), strict=True):
        now = found.cpu()
        assert torch.equal(now[:150], was[:150])
        assert not now[150:200].any()
        assert torch.equal(now[200:250], was[200:250])
        assert torch.equal(now[250], was[160])
        assert torch.equal(now[251:], was[251:])
    device.close()


def test_memory_can_be_pinned_again_and_again() -> None:
    device = CudaDevice()
    for _ in range(3):
        memory = device.host_memory(200 * 2**20 + 1)
        assert memory.is_pinned() and memory.nbytes == 200 * 2**20 + 1
        del memory
        gc.collect()
    device.close()


def rounds(
    model: Path, prompts: Sequence[IntArray], sampling: SamplingParams = GREEDY, **options: Any
) -> tuple[list[list[list[int]]], SchedulerStats]:
    """What an engine answers when the prompts come again and again."""
    chosen = {"max_running_requests": 16, "max_prefill_tokens": 256, **options}
    engine = build_engine(EngineOptions(model=str(model), device="cuda", **chosen))
    try:
        found = []
        for _ in range(NUM_ROUNDS):
            sinks = [submitted(engine, prompt, sampling) for prompt in prompts]
            for sink in sinks:
                sink.wait()
            found.append([sink.tokens for sink in sinks])
        return found, engine.stats().scheduler
    finally:
        engine.close(drain_s=0)


@pytest.mark.parametrize("case", ["qwen3", "youtu", "deepseek-v2", "deepseek-v32"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8_e4m3"}], ids=["plain", "fp8"])
def test_tokens_of_every_kind_of_page(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    """They are as good as those of an engine that computes them. float8 moves them by itself."""
    reference = write_checkpoint(case, tmp_path).float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    small = {"max_sequence_length": CONTEXT, "num_pages": 60, "page_size": 16, **options}
    if not options:
        small["dtype"] = "float32"
    cold, _ = rounds(tmp_path, prompts, **{**small, "cache": "naive"})
    found, stats = rounds(tmp_path, prompts, **{**small, "host_cache_gib": 0.05})
    assert stats.host_loaded_tokens > 0
    least = np.mean([shortfalls(reference, prompts, each) for each in cold])
    for each in found:
        assert np.mean(shortfalls(reference, prompts, each)) < 2 * least + 0.01


def test_tokens_with_an_mtp_layer(tmp_path: Path) -> None:
    write_mtp_checkpoint("glm4-moe", tmp_path, predictable=True)
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    found, stats = rounds(
        tmp_path,
        prompts,
        max_sequence_length=CONTEXT,
        num_pages=60,
        dtype="float32",
        speculative_mtp_tokens=2,
        host_cache_gib=0.05,
    )
    assert stats.host_loaded_tokens > 0
    assert stats.num_right_guesses > stats.num_guesses / 3
    assert [len(tokens) for tokens in found[-1]] == [GREEDY.max_tokens] * len(prompts)


@pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
def test_states_return_as_they_were(shape: RecurrentSpec) -> None:
    device = CudaDevice()
    storage = storage_of(shape, device.torch_device)
    host = HostSlots(states=HostStates(storage, device, num_slots=3))
    before = [[it.cpu() for it in of_snapshot] for of_snapshot in contents_of(storage)]

    def steps() -> None:
        host.save(states((3, 2), (0, 1)))
        for number in (0, 3):
            for it in storage.snapshot(number):
                it.zero_()
        host.load(states((1, 2), (3, 1)))

    device.submit(steps).result()
    came_from = {1: 3, 2: 2, 3: 0, 4: 4}
    for number, found in enumerate(contents_of(storage)):
        if number == 0:
            assert not any(it.any() for it in found)
        else:
            now = [it.cpu() for it in found]
            assert all(map(torch.equal, now, before[came_from[number]]))
    device.close()


@pytest.mark.parametrize("case", ["mistral-window", "gemma3", "gpt-oss"])
def test_tokens_of_layers_with_windows(case: str, tmp_path: Path) -> None:
    """With window pages from main memory they are as good as those of an engine that computes."""
    reference = write_checkpoint(case, tmp_path).float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    small: dict[str, Any] = {"max_sequence_length": CONTEXT, "num_pages": 60, "dtype": "float32"}
    cold, _ = rounds(tmp_path, prompts, **{**small, "cache": "naive"})
    found, stats = rounds(tmp_path, prompts, **small, host_cache_gib=0.05)
    assert stats.host_loaded_tokens > 0
    least = np.mean([shortfalls(reference, prompts, each) for each in cold])
    for each in found:
        assert np.mean(shortfalls(reference, prompts, each)) < 2 * least + 0.01


@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h", "lfm2", "kimi-linear"])
def test_tokens_of_recurrent_layers(case: str, tmp_path: Path) -> None:
    """With states from main memory they are as good as those of an engine that computes them."""
    reference = write_checkpoint(case, tmp_path).float()
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    small: dict[str, Any] = {"max_sequence_length": CONTEXT, "num_pages": 60, "dtype": "float32"}
    cold, _ = rounds(tmp_path, prompts, **{**small, "cache": "naive"})
    found, stats = rounds(tmp_path, prompts, **small, state_snapshots=40, host_cache_gib=0.05)
    assert stats.used_state_slots > 0 and stats.host_loaded_tokens > 0
    least = np.mean([shortfalls(reference, prompts, each) for each in cold])
    for each in found:
        assert np.mean(shortfalls(reference, prompts, each)) < 2 * least + 0.01


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8_e4m3", "overlap": False}])
def test_tokens_are_the_same_bit_by_bit(options: dict[str, Any], tmp_path: Path) -> None:
    """With kernels that do not depend on what is cached."""
    folder = tmp_path / "model"
    write_dummy_model("qwen3-0.6b", folder)
    config = {**DUMMY_SHAPES["qwen3-0.6b"], "num_hidden_layers": 3, "vocab_size": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 4096, length).astype(np.int32) for length in range(100, 900, 50)]
    chosen: dict[str, Any] = {
        "load_format": "dummy",
        "batch_invariant": True,
        "num_pages": 150,
        "seed": 0,
        **options,
    }
    sampling = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    cold, _ = rounds(folder, prompts, sampling, **{**chosen, "cache": "naive"})
    found, stats = rounds(folder, prompts, sampling, **{**chosen, "host_cache_gib": 1.0})
    assert stats.host_loaded_tokens > 1000
    for each in found:
        assert each == cold[0]
