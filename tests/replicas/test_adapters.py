"""Adapters on several replicas: their parent knows them, each loads them, and requests prefer a
replica that has theirs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from minisgl_backend.build import build_engine
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError, InvalidRequest, Recovering
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.replicas.adapters import ReplicatedAdapters
from minisgl_backend.replicas.messages import Message
from minisgl_backend.request import Adapter, AdapterFacts, Request, SamplingParams
from minisgl_backend.routing.cache_index import CacheIndex
from minisgl_backend.routing.router import ReplicaCapacity, Router
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_check.processes import children_of
from minisgl_kit.adapters import write_adapter
from tests.parallel.engines import Answer, some_prompts, wait_for_all
from tests.waiting import PATIENCE_S, wait_until

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "num_pages": 1024,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 8,
}


# --- the names, beside replicas that answer when they are told to ---------------------------------


class Replica:
    """Records what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, message: Message) -> None:
        self.sent.append(message)


class InterruptedReplica(Replica):
    """Ctrl-C comes when it has been sent its first message."""

    def send(self, message: Message) -> None:
        super().send(message)
        if len(self.sent) == 1:
            raise KeyboardInterrupt


class World:
    def __init__(self) -> None:
        self.replicas = [Replica(), Replica()]
        self.adapters = ReplicatedAdapters(self.replicas, tasks={3: "a"})
        self.pool = ThreadPoolExecutor(4)

    def load(self, name: str) -> Future[Adapter]:
        """Begin to load an adapter; every serving replica is told about it."""
        number = sum(len(replica.sent) for replica in self.replicas)
        future = self.pool.submit(self.adapters.load, name, f"/{name}")
        wait_until(
            lambda: future.done() or sum(len(replica.sent) for replica in self.replicas) > number
        )
        self.adapters.known()  # waits until all have been told
        return future

    def known(self, name: str) -> Adapter:
        """Load an adapter on both replicas."""
        future = self.load(name)
        (number, _, _) = self.replicas[0].sent[-1]["load"]
        for replica in (0, 1):
            assert not self.adapters.answered(replica, number, AdapterFacts(8, 3, 9))
        return future.result(PATIENCE_S)


@pytest.fixture
def world() -> Iterator[World]:
    it = World()
    yield it
    it.adapters.close()
    it.pool.shutdown()


def test_a_name_is_known_when_all_replicas_have_it(world: World) -> None:
    future = world.load("a")
    assert world.replicas[0].sent == world.replicas[1].sent == [{"load": [1, "a", "/a"]}]
    world.adapters.answered(0, 1, AdapterFacts(8, 3, 9))
    with pytest.raises(InvalidRequest, match=r"LoRA a is not supported, we currently support \[\]"):
        world.adapters.find("a")
    with pytest.raises(InvalidRequest, match="loaded already"):
        world.adapters.load("a", "/b")
    world.adapters.answered(1, 1, AdapterFacts(8, 3, 9))
    assert future.result(PATIENCE_S) == Adapter(1, "a", "/a", AdapterFacts(8, 3, 9))
    assert world.adapters.find("a") is world.adapters.of_task(3) is future.result()


def test_an_adapter_that_one_cannot_load_leaves_nothing_behind(world: World) -> None:
    future = world.load("a")
    world.adapters.answered(0, 1, AdapterFacts(8, 3, 9))
    world.adapters.answered(1, 1, "adapter 'a': layers does not fit")
    with pytest.raises(InvalidRequest, match="layers does not fit"):
        future.result(PATIENCE_S)
    assert all(replica.sent[-1] == {"unload": "a"} for replica in world.replicas)
    assert not world.adapters.known()
    assert world.known("a").id == 2

    future = world.load("b")
    world.adapters.answered(0, 3, AdapterFacts(8, 3, 9))
    world.adapters.answered(1, 3, AdapterFacts(8, 3, 7))
    with pytest.raises(InvalidRequest, match="its files changed while it was loaded"):
        future.result(PATIENCE_S)


def test_unloading_reaches_all(world: World) -> None:
    adapter = world.known("a")
    assert world.adapters.unload("a") == adapter
    assert all(replica.sent[-1] == {"unload": "a"} for replica in world.replicas)
    with pytest.raises(InvalidRequest, match="there is no adapter 'a'"):
        world.adapters.unload("a")


def test_a_replica_that_is_started_again_gets_all_adapters(world: World) -> None:
    names = [world.known(name) for name in ("a", "b")]
    world.adapters.lost(1)
    future = world.load("c")
    world.replicas[1].sent.clear()
    assert not world.adapters.joined(1)
    orders = [{"load": [each.id, each.name, each.path]} for each in names]
    assert world.replicas[1].sent == [*orders, {"load": [3, "c", "/c"]}]
    assert not world.adapters.answered(1, 1, AdapterFacts(8, 3, 9))
    assert world.adapters.answered(1, 2, "adapter 'b': its files are gone")  # as far as possible
    world.adapters.answered(0, 3, AdapterFacts(8, 3, 9))
    assert not future.done()
    world.adapters.answered(1, 3, AdapterFacts(8, 3, 9))
    assert future.result(PATIENCE_S).id == 3
    assert world.adapters.joined(1)
    assert not world.adapters.answered(0, 77, AdapterFacts(8, 3, 9))


def test_a_replica_that_is_started_again_may_find_other_files(world: World) -> None:
    """Requests there then read the adapter again, and are told."""
    adapter = world.known("a")
    world.adapters.lost(1)
    world.replicas[1].sent.clear()
    world.adapters.joined(1)
    assert world.adapters.answered(1, adapter.id, AdapterFacts(8, 3, 7))
    assert world.replicas[1].sent[-1] == {"unload": "a"}
    assert world.adapters.find("a") == adapter


def test_loading_does_not_wait_for_lost_replicas(world: World) -> None:
    future = world.load("a")
    world.adapters.answered(0, 1, AdapterFacts(8, 3, 9))
    world.adapters.lost(1)
    assert not world.adapters.answered(1, 1, AdapterFacts(8, 3, 9))
    assert future.result(PATIENCE_S).id == 1
    future = world.load("b")
    world.adapters.lost(0)
    with pytest.raises(Recovering, match="no replica of the engine serves"):
        future.result(PATIENCE_S)
    with pytest.raises(Recovering):
        world.adapters.load("c", "/c")


def test_ctrl_c_while_it_loads_leaves_nothing_behind() -> None:
    """Ctrl-C may come at any point; here it comes as soon as the second replica has been told."""
    first, second = Replica(), InterruptedReplica()
    adapters = ReplicatedAdapters([first, second])
    with pytest.raises(KeyboardInterrupt):
        adapters.load("a", "/a")
    assert first.sent == second.sent == [{"load": [1, "a", "/a"]}, {"unload": "a"}]
    assert not adapters.known()


def test_loading_ends_with_the_engine(world: World) -> None:
    future = world.load("a")
    world.adapters.close()
    with pytest.raises(Recovering):
        future.result(PATIENCE_S)


# --- the rule -------------------------------------------------------------------------------------


def test_requests_go_where_their_adapter_is_unless_that_is_busy() -> None:
    router = Router(
        CacheIndex(3, 1000),
        page_size=4,
        capacity=ReplicaCapacity(rows=10, prefill_tokens=1000, pages=1000),
        num_adapter_slots=2,
    )
    rng = np.random.default_rng(0)

    def route(adapter_id: int | None) -> int:
        prompt = rng.integers(0, 1000, 8).astype(np.int32)
        placement = router.route(prompt, f" {adapter_id}", adapter_id=adapter_id)
        assert placement is not None
        placements.append(placement)
        return placement.replica

    placements: list[Any] = []
    homes = [route(adapter_id) for adapter_id in (1, 2, 3)]
    assert sorted(homes) == [0, 1, 2]
    for placement in placements:
        router.end(placement)
    for _ in range(3):
        for adapter_id, home in zip((3, 1, 2), (homes[2], homes[0], homes[1]), strict=True):
            assert route(adapter_id) == home
            router.end(placements[-1])
    busy = [route(1) for _ in range(12)]  # they stay open
    assert len(set(busy)) == 3
    assert max(map(busy.count, range(3))) <= 6
    router.leave(homes[2])
    assert route(3) != homes[2]


def test_slots_hold_the_adapters_of_the_last_requests() -> None:
    router = Router(
        CacheIndex(1, 10), page_size=4, capacity=ReplicaCapacity(1, 1, 1), num_adapter_slots=2
    )
    for adapter_id in (1, 2, 1, 3):
        router.adapters.expect(0, adapter_id)
    assert [router.adapters.holders(adapter_id) for adapter_id in (1, 2, 3)] == [1, 0, 1]
    router.leave(0)
    assert router.adapters.holders(1) == 0


# --- real replicas --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, spec = tmp_path_factory.mktemp("adapters"), load_spec(Path(DEMO_MODEL))
    return {
        f"seed-{seed}": write_adapter(folder / f"{seed}", spec, rank=4 * seed, seed=seed)
        for seed in (1, 2, 3)
    }


@pytest.fixture(scope="module")
def engine(paths: dict[str, Path]) -> Iterator[EngineBase]:
    """Two replicas, with the first adapter from the start."""
    name, path = next(iter(paths.items()))
    options = EngineOptions(data_parallel_size=2, lora_modules=f"{name}={path}", **OPTIONS)
    engine = build_engine(options)
    try:
        yield engine
    finally:
        engine.close(drain_s=0)


def answered(engine: EngineBase, names: list[str | None]) -> list[list[int]]:
    """The tokens of some prompts, with adapters in turn."""
    prompts = some_prompts(18, vocab_size=engine.info.vocab_size)
    answers = []
    for index, prompt in enumerate(prompts):
        answer = Answer(engine.new_id())
        adapter = engine.adapter(names[index % len(names)], None)
        request = Request(id=answer.request_id, prompt=prompt, sampling=GREEDY, adapter=adapter)
        engine.submit(request, answer)
        answers.append(answer)
    wait_for_all(answers)
    assert all(answer.error is None for answer in answers)
    return [answer.tokens for answer in answers]


def test_replicas_have_the_same_adapters(engine: EngineBase, paths: dict[str, Path]) -> None:
    """Tokens are those of one engine, after loading and after a killed replica has come back."""
    names: list[str | None] = [*paths, None]
    with_one = EngineOptions(**OPTIONS)
    alone = build_engine(with_one)
    try:
        for name, path in paths.items():
            alone.adapters.load(name, str(path))
            if name not in engine.adapters.known():
                engine.adapters.load(name, str(path))
        expected = answered(alone, names)
    finally:
        alone.close(drain_s=0)
    assert answered(engine, names) == expected
    assert all(replica.num_routed for replica in engine.replicas())

    first = engine.replicas()[0]
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: engine.replicas()[0].num_starts > first.num_starts)
    wait_until(lambda: all(replica.is_up for replica in engine.replicas()))
    before = engine.replicas()[0].num_routed
    assert answered(engine, names) == expected
    assert engine.replicas()[0].num_routed > before


def test_loading_and_unloading_beside_requests(engine: EngineBase, paths: dict[str, Path]) -> None:
    path = str(paths["seed-2"])
    ended = threading.Event()
    failures: list[BaseException] = []

    def load_and_unload() -> None:
        try:
            while not ended.is_set():
                adapter = engine.adapters.load("passing", path)
                assert engine.adapters.find("passing") == adapter
                engine.adapters.unload("passing")
                with pytest.raises(InvalidRequest, match="passing"):
                    engine.adapters.load("passing", path + "/none")
                time.sleep(0.01)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=load_and_unload)
    thread.start()
    try:
        first = answered(engine, ["seed-1", None])
        assert answered(engine, ["seed-1", None]) == first
    finally:
        ended.set()
        thread.join()
    assert not failures
    assert "passing" not in engine.adapters.known()


def test_running_adapters_are_those_of_all(engine: EngineBase) -> None:
    answers = [Answer(engine.new_id()) for _ in range(8)]
    long = SamplingParams(max_tokens=3000, ignore_eos=True)
    for number, answer in enumerate(answers):
        prompt = np.arange(number, number + 9, dtype=np.int32)
        adapter = engine.adapter("seed-1", None)
        engine.submit(
            Request(id=answer.request_id, prompt=prompt, sampling=long, adapter=adapter), answer
        )
    wait_until(lambda: engine.stats().running_adapters == ("seed-1",))
    for answer in answers:
        engine.abort(answer.request_id)
    wait_for_all(answers)
    wait_until(lambda: not engine.stats().running_adapters)


@pytest.mark.parametrize(("owner", "name"), [(ReplicatedAdapters, "load"), (Router, "__init__")])
def test_a_start_that_is_cut_off_leaves_no_replicas(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While adapters load, and before."""

    def cut_off(*arguments: object, **options: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, cut_off)
    before = children_of(os.getpid())
    with pytest.raises(KeyboardInterrupt):
        build_engine(EngineOptions(data_parallel_size=2, lora_modules="a=/a", **OPTIONS))
    assert set(children_of(os.getpid())) <= set(before)


def test_an_adapter_of_the_options_that_does_not_fit_is_a_config_error(tmp_path: Path) -> None:
    options = EngineOptions(data_parallel_size=2, lora_modules=f"bad={tmp_path}", **OPTIONS)
    with pytest.raises(ConfigError, match="adapter 'bad'"):
        build_engine(options)
