"""What a rank takes of a GPU: its graphs, what does not fit, and what its planner is told."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from minisgl_backend import build_rank, rank_memory
from minisgl_backend.build_scheduler import build_scheduler
from minisgl_backend.cache.kv import KVCache
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.states import bytes_per_slot, pending_bytes
from minisgl_backend.execution.storage import bytes_per_page
from minisgl_backend.host_memory import HostMemory
from minisgl_backend.kernels.gated_delta import DeltaStates
from minisgl_backend.kernels.sampling_table import SamplingTable
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.recurrent_spec import DeltaSpec, KimiDeltaSpec, MambaSpec, RecurrentSpec
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.parts import STANDARD
from minisgl_backend.rank_memory import HostSizes
from minisgl_backend.resolve import Resolved
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.fakes.engine_info import engine_info


def out_of_memory(*arguments: object, **options: object) -> NoReturn:
    raise torch.OutOfMemoryError("CUDA out of memory")


def facts_of(num_ranks: int = 1, **options: Any) -> Resolved:
    """Facts about the demo model on a GPU with 1,000 free bytes."""
    folder = Path(DEMO_MODEL)
    spec = load_spec(folder)
    device: Any = SimpleNamespace(
        torch_device=torch.device("cuda", 1),
        free_memory=lambda: 1000,
        kv_bytes_cap=None,
        is_host=False,
    )
    return Resolved(
        options=EngineOptions(**options),
        place=RankPlace.first(num_ranks, None),
        device=device,
        comm="nccl",
        folder=folder,
        spec=spec,
        shape=spec.attention_shape(num_ranks),
        context=128,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        state_dtype=torch.float32,
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_too_little_memory_for_weights(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights fit."""
    facts = facts_of(num_ranks)
    num_bytes = 2 * facts.spec.num_parameters // num_ranks
    monkeypatch.setattr(build_rank, "build_model", out_of_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2**37))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: num_bytes // 2)
    group: Any = SimpleNamespace(size=num_ranks, rank=1)
    message = f"take about {num_bytes:,} bytes of cuda:1, which has {num_bytes // 2 + 1000:,} free"
    with pytest.raises(ConfigError, match=message):
        build_rank.build_rank(facts, lambda: group, lambda: None, STANDARD)


@pytest.mark.parametrize(
    ("options", "name"), [({"num_pages": 10**6}, "num_pages"), ({}, "memory_ratio")]
)
def test_too_little_memory_for_pages(
    options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = facts_of(**options)
    page_bytes = bytes_per_page(facts.shape, 16, torch.bfloat16)
    num_pages = options.get("num_pages", 100)
    model = SimpleNamespace(pack=lambda: None, mtp=None)
    monkeypatch.setattr(build_rank, "build_model", lambda *arguments, **options: model)
    monkeypatch.setattr(rank_memory, "choose_num_pages", lambda **facts: 100)
    monkeypatch.setattr(rank_memory, "KVStorage", out_of_memory)
    needed = (num_pages + 1) * page_bytes
    message = (
        f"{num_pages} KV pages of 16 .* {needed:,} bytes of cuda:1, .* 1,000 free: lower {name}"
    )
    with pytest.raises(ConfigError, match=message):
        build_rank.build_rank(facts, OneRank, lambda: None, STANDARD)


def host_facts(num_ranks: int = 1, **options: Any) -> Resolved:
    """Facts about the demo model on a CPU."""
    return replace(
        facts_of(num_ranks, num_pages=8, **options), device=CpuDevice(), kv_dtype=torch.float32
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_main_memory_is_shared_out_to_the_ranks(num_ranks: int) -> None:
    facts = host_facts(num_ranks, host_cache_gib=0.25)
    page_bytes = bytes_per_page(facts.shape, 16, torch.float32)
    sizes = rank_memory.cache_sizes(facts, OneRank())
    assert sizes.host.num_slots == 2**28 // (page_bytes * num_ranks) > 100
    storage = rank_memory.make_storage(facts, sizes)
    assert storage.page_bytes() == page_bytes
    slots = rank_memory.make_host_slots(facts, sizes, storage, None)
    assert slots is not None and slots.states is None and slots.window_pages is None
    none = replace(sizes, host=HostSizes())
    assert rank_memory.make_host_slots(facts, none, storage, None) is None


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_states_get_half_of_main_memory(num_ranks: int) -> None:
    facts = host_facts(num_ranks, host_cache_gib=0.25, max_running_requests=2)
    delta = DeltaSpec(
        layers=frozenset({0, 2}),
        num_key_heads=2,
        num_heads=4,
        key_dim=16,
        value_dim=16,
        conv_width=4,
    )
    facts = replace(facts, spec=replace(facts.spec, recurrent=delta), dtype=torch.float32)
    page_bytes = bytes_per_page(facts.shape, 16, torch.float32)
    state_bytes = bytes_per_slot(delta.of_rank(num_ranks), torch.float32, torch.float32)
    sizes = rank_memory.cache_sizes(facts, OneRank())
    half = 2**27 // num_ranks
    assert sizes.host == (half // page_bytes, 0, half // state_bytes)
    storage, states = rank_memory.make_storage(facts, sizes), rank_memory.make_states(facts, sizes)
    slots = rank_memory.make_host_slots(facts, sizes, storage, states)
    assert slots is not None and slots.states is not None
    tiny = replace(facts, options=replace(facts.options, host_cache_gib=page_bytes / 2**30))
    least = (page_bytes + state_bytes) * num_ranks
    message = f"no room for a page of 16 .* to go on from it, which take {least:,} bytes"
    with pytest.raises(ConfigError, match=message):
        rank_memory.cache_sizes(tiny, OneRank())


@pytest.mark.parametrize("windows", [(None, 40), (40, 40)], ids=["some", "in all layers"])
def test_windows_have_slots_of_their_own(windows: tuple[int | None, ...]) -> None:
    """A window for every 4,096 tokens."""
    facts = host_facts(host_cache_gib=0.25)
    layers = (windows * facts.spec.num_layers)[: facts.spec.num_layers]
    facts = replace(facts, shape=replace(facts.shape, windows=layers, window_pages=True))
    sizes = rank_memory.cache_sizes(facts, OneRank())
    storage = rank_memory.make_storage(facts, sizes)
    page_bytes, window_bytes = storage.page_bytes(), storage.page_bytes(window_pages=True)
    span = 3  # of 40 positions over pages of 16
    taken = sizes.host.num_slots * page_bytes + sizes.host.num_window_slots * window_bytes
    assert 2**28 - page_bytes - window_bytes < taken <= 2**28
    assert sizes.host.num_slots // 256 == sizes.host.num_window_slots // span > 10
    assert sizes.host.num_state_slots == 0
    few = replace(sizes, host=HostSizes(4, 3, 0))
    slots = rank_memory.make_host_slots(facts, few, storage, None)
    assert slots is not None and slots.window_pages is not None
    assert (slots.pages is None) == (None not in windows)


def test_too_little_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = host_facts(host_cache_gib=0.25)
    page_bytes = bytes_per_page(facts.shape, 16, torch.float32)
    tiny = host_facts(host_cache_gib=page_bytes / 2**31)
    with pytest.raises(ConfigError, match=f"no room for a page of 16 .* take {page_bytes:,} byt"):
        rank_memory.cache_sizes(tiny, OneRank())
    sizes = rank_memory.cache_sizes(facts, OneRank())
    storage = rank_memory.make_storage(facts, sizes)
    with monkeypatch.context() as patch:
        memory = HostMemory(total=2**30, free=2**28 - 2 * page_bytes)
        patch.setattr(HostMemory, "now", lambda: memory)
        with pytest.raises(ConfigError, match=rf"gib=0\.25 takes .* can have {memory.free:,}$"):
            rank_memory.cache_sizes(facts, OneRank())

    def no_memory(num_bytes: int) -> NoReturn:
        raise MemoryError("it cannot be pinned")

    monkeypatch.setattr(facts.device, "host_memory", no_memory)
    needed = page_bytes * sizes.host.num_slots
    message = f"host_cache_gib=0.25: {needed:,} bytes on this rank: it cannot be pinned"
    with pytest.raises(ConfigError, match=message):
        rank_memory.make_host_slots(facts, sizes, storage, None)


@pytest.mark.parametrize("num_host_slots", [0, 7])
def test_the_planner_knows_how_many_pages_main_memory_keeps(num_host_slots: int) -> None:
    scheduler = build_scheduler(EngineOptions(), engine_info(num_host_slots=num_host_slots))
    assert scheduler.stats().host_slots == num_host_slots
    assert scheduler.renewed().stats().host_slots == num_host_slots


def test_all_ranks_capture_the_same() -> None:
    """Only rank 0 has masks, but steps with masks are captured with sums over all ranks."""
    attention: Any = SimpleNamespace(can_capture=True, captures_chunks=False, name="any")
    limits = []
    for rank in range(2):
        model: Any = SimpleNamespace(
            group=SimpleNamespace(size=2, rank=rank),
            model=SimpleNamespace(layers=nn.ModuleList()),
            spec=facts_of().spec,
            dtype=torch.bfloat16,
        )
        limits.append(build_rank._limits(facts_of(2), attention, model, 64))
    assert limits[0] == limits[1]
    assert limits[0].takes_masks and limits[0].graph_sizes


@pytest.mark.parametrize("windows", [(8,), (8, None)])
def test_an_engine_that_is_told_its_number_of_pages_gets_the_same_window_pages(
    windows: tuple[int | None, ...],
) -> None:
    """A replica that starts again is told how many pages the first process chose."""
    facts = facts_of(page_size=1, max_running_requests=2)
    shape = replace(facts.shape, windows=(windows * facts.spec.num_layers)[: facts.spec.num_layers])
    device: Any = SimpleNamespace(free_memory=lambda: 2**24, kv_bytes_cap=None, is_host=False)
    facts = replace(facts, shape=replace(shape, window_pages=True), device=device)
    chosen = rank_memory.cache_sizes(facts, OneRank())
    told = replace(facts, options=replace(facts.options, num_pages=chosen.num_pages))
    assert chosen.num_window_pages is not None and chosen.num_window_pages < chosen.num_pages
    assert rank_memory.cache_sizes(told, OneRank()) == chosen


@pytest.mark.parametrize(
    "shape",
    [
        DeltaSpec(
            num_key_heads=2,
            num_heads=4,
            key_dim=8,
            value_dim=16,
            conv_width=4,
            layers=frozenset({0}),
        ),
        KimiDeltaSpec(
            num_key_heads=4,
            num_heads=4,
            key_dim=16,
            value_dim=16,
            conv_width=4,
            layers=frozenset({0}),
        ),
        MambaSpec(
            num_heads=4,
            head_dim=16,
            state_size=8,
            num_groups=2,
            conv_width=4,
            layers=frozenset({0}),
        ),
    ],
    ids=["delta", "kimi", "mamba"],
)
def test_states_of_16_bits_leave_memory_for_more_snapshots(shape: RecurrentSpec) -> None:
    facts = facts_of(num_pages=8, max_running_requests=8, memory_ratio=1.0)
    facts = replace(facts, spec=replace(facts.spec, recurrent=shape))
    wide = bytes_per_slot(shape, facts.dtype, torch.float32)
    of_rows = SamplingTable.num_bytes(9, facts.spec.vocab_size) + 9 * pending_bytes(shape)
    num_bytes = of_rows + (9 + 4 * 2) * wide
    device: Any = SimpleNamespace(
        torch_device=torch.device("cpu"),
        free_memory=lambda: num_bytes,
        kv_bytes_cap=None,
        is_host=False,
    )
    found = {}
    for state_dtype in (torch.float32, torch.bfloat16, torch.float16):
        own = replace(facts, device=device, state_dtype=state_dtype)
        sizes = rank_memory.cache_sizes(own, OneRank())
        states = rank_memory.make_states(own, sizes)
        assert states is not None and sizes.num_snapshots is not None
        (layer,) = states.layers
        assert isinstance(layer, DeltaStates) == isinstance(shape, DeltaSpec)
        assert layer.conv.dtype == facts.dtype and layer.matrices.dtype == state_dtype
        slot_bytes = bytes_per_slot(shape, facts.dtype, state_dtype)
        of_slots = layer.conv.nbytes + layer.matrices.nbytes
        assert of_slots == (9 + sizes.num_snapshots) * slot_bytes
        pending = attrgetter("keys", "values", "decays", "begins")(layer.pending)
        assert sum(each.nbytes for each in pending) == 9 * pending_bytes(shape)
        found[state_dtype] = sizes.num_snapshots
    assert found[torch.float32] == 2
    assert found[torch.bfloat16] == found[torch.float16] >= 4


@pytest.mark.parametrize(
    ("device", "reads_groups", "options", "bound"),
    [
        ("cuda", True, {}, 1024),
        ("cuda", False, {}, 0),
        ("cpu", True, {}, 256),
        ("cpu", False, {}, 256),
        ("cpu", True, {"cache": "naive"}, 0),
        ("cuda", True, {"schedule_policy": "lpm"}, 64),
        ("cuda", True, {"max_overtaken": 5}, 5),
    ],
)
def test_how_many_may_pass_a_waiting_request(
    device: str, reads_groups: bool, options: dict[str, Any], bound: int
) -> None:
    info = engine_info(device=device, reads_groups=reads_groups)
    configs = []

    def scheduler(cache: KVCache, config: SchedulerConfig) -> Scheduler:
        configs.append(config)
        return Scheduler(cache, config)

    build_scheduler(EngineOptions(**options), info, replace(STANDARD, scheduler=scheduler))
    assert configs[0].max_overtaken == bound
    assert configs[0].names_groups == reads_groups
