"""What takes the place of an engine's parts is used, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.build import build_engine, build_executor
from minisgl_backend.cache.kv import KVCache
from minisgl_backend.config import EngineOptions
from minisgl_backend.device.base import HostArray
from minisgl_backend.errors import EngineFailure
from minisgl_backend.execution.ranks import RankExecutor
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.parts import Parts
from minisgl_backend.request import SamplingParams
from minisgl_backend.runtime import ports
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_bench.engines import submitted
from tests.fakes.executor import tokens_of

OPTIONS = EngineOptions(device="cpu", num_pages=16, max_sequence_length=128)


def answer(parts: Parts) -> list[int]:
    engine = build_engine(OPTIONS, parts)
    try:
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        sink = submitted(engine, tokens_of([5, 6, 7]), sampling)
        sink.wait()
    finally:
        engine.close(drain_s=0)
    return sink.tokens


def test_each_part_is_made_as_it_is_told() -> None:
    made: list[str] = []

    def engine(
        info: EngineInfo,
        scheduler: ports.Scheduler,
        executor: ports.Executor,
        *,
        overlap: bool,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
    ) -> Engine:
        made.append("engine")
        return Engine(
            info, scheduler, executor, overlap=overlap, grammars=grammars, adapters=adapters
        )

    def scheduler(cache: KVCache, config: SchedulerConfig) -> ports.Scheduler:
        made.append("scheduler")
        return Scheduler(cache, config)

    def executor(of_rank: RankExecutor) -> RankExecutor:
        made.append("executor")
        return of_rank

    parts = Parts(engine=engine, scheduler=scheduler, executor=executor)
    assert answer(parts) == answer(Parts())
    assert made == ["executor", "scheduler", "engine"]


@pytest.mark.parametrize("part", ["scheduler", "engine"])
def test_the_executor_is_closed_if_another_part_cannot_be_made(part: str) -> None:
    closed: list[bool] = []

    class Watched:
        def __init__(self, inner: RankExecutor) -> None:
            self.launch, self.renew, self._close = inner.launch, inner.renew, inner.close

        def close(self) -> None:
            self._close()
            closed.append(True)

    def broken(*_args: Any, **_named: Any) -> Any:
        raise MemoryError

    parts: dict[str, Any] = {"executor": Watched, part: broken}

    with pytest.raises(MemoryError):
        build_engine(OPTIONS, Parts(**parts))
    assert closed == [True]


@pytest.mark.parametrize("what", ["engine", "adapter"])
def test_adapters_are_closed_if_the_start_is_cut_off(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Adapters] = []
    close = Adapters.close

    def closing(adapters: Adapters) -> None:
        closed.append(adapters)
        close(adapters)

    def cut_off(*_args: Any, **_named: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Adapters, "close", closing)
    options, parts = replace(OPTIONS, enable_lora=True), Parts()
    if what == "engine":
        parts = Parts(engine=cut_off)
    else:
        monkeypatch.setattr(Adapters, "load", cut_off)
        options = replace(options, lora_modules="a=/a")
    with pytest.raises(KeyboardInterrupt):
        build_engine(options, parts)
    assert len(closed) == 1


def test_tokens_are_sampled_from_the_logits_that_the_watch_returns() -> None:
    seen: list[tuple[tuple[int, ...], int]] = []

    def prefer_9(logits: Tensor, rows: HostArray) -> Tensor:
        seen.append((tuple(logits.shape), len(rows)))
        return torch.zeros_like(logits).index_fill(1, torch.tensor([9]), 1.0)

    assert answer(Parts(watch_logits=prefer_9)) == [9] * 5
    vocab_size = seen[0][0][1]
    assert seen[:5] == [((1, vocab_size), 1)] * 5


def test_a_follower_runs_the_module_that_is_named() -> None:
    options = EngineOptions(device="cpu", num_pages=16, tensor_parallel_size=2)
    with pytest.raises(EngineFailure, match="rank 1"):
        build_executor(options, Parts(follower="minisgl_backend.is_not_there"))
