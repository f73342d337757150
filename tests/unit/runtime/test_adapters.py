"""Adapters in main memory: the pool, waiting for it, and names that come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from minisgl_backend.errors import ConfigError, EngineFailure, InvalidRequest
from minisgl_backend.file_names import reachable
from minisgl_backend.request import Adapter, AdapterFacts, RequestId
from minisgl_backend.runtime.adapters import MOST_PAST, Adapters, Fetched
from tests.waiting import PATIENCE_S, wait_until


class Memory:
    """A ``Reader`` that remembers what it holds; paths that begin with "bad" cannot be read."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.most = 0
        self.may_read = threading.Event()
        self.may_read.set()
        self.fails: Exception | None = None
        self.files = 1
        self.base = ""
        self.num_asked = 0

    def check(self, folder: Path) -> AdapterFacts:
        self.num_asked += 1
        assert self.may_read.wait(PATIENCE_S)
        if folder.name.startswith("bad"):
            raise ConfigError("layers.3.lora_A.weight does not fit")
        return AdapterFacts(8, 3, self.files, base=self.base)

    def read(self, adapter_id: int, folder: Path) -> AdapterFacts:
        facts = self.check(folder)
        if self.fails is not None:
            raise self.fails
        assert adapter_id not in self.held
        self.held.add(adapter_id)
        self.most = max(self.most, len(self.held))
        return facts

    def drop(self, adapter_id: int) -> None:
        self.held.discard(adapter_id)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def adapters(memory: Memory) -> Iterator[Adapters]:
    made = Adapters(memory, most_in_memory=2, tasks={7: "a"})
    yield made
    made.close()


@pytest.fixture
def told() -> SimpleQueue[Fetched]:
    return SimpleQueue()


def ids(*numbers: int) -> list[RequestId]:
    return [RequestId(number) for number in numbers]


def names(adapters: Adapters) -> list[str]:
    return list(adapters.known())


def test_names_are_found_and_others_refused_in_the_words_of_vllm_backend(
    adapters: Adapters,
) -> None:
    loaded = adapters.load("a", "folder")
    assert adapters.find("a") is loaded and adapters.of_task(7) is loaded
    adapters.load("b", "folder")
    wanted = r"^LoRA c is not supported, we currently support \['a', 'b'\]$"
    with pytest.raises(InvalidRequest, match=wanted):
        adapters.find("c")
    with pytest.raises(InvalidRequest, match="lora_task_id 8 is none of lora_task_ids"):
        adapters.of_task(8)
    with pytest.raises(InvalidRequest, match="'a' is loaded already"):
        adapters.load("a", "elsewhere")
    with pytest.raises(InvalidRequest, match="printable"):
        adapters.load("a\n", "folder")


def test_the_log_says_for_which_model_an_adapter_was_trained(
    adapters: Adapters, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        adapters.load("a", "folder")
        memory.base = "owner/name"
        adapters.load("b", "folder")
    assert caplog.messages == [
        "loaded adapter 'a' of rank 8 from folder",
        "loaded adapter 'b' of rank 8 from folder, trained for 'owner/name'",
    ]


def test_errors_cut_a_name_that_no_adapter_can_have(adapters: Adapters) -> None:
    known, unknown = "k" * 128, "u" * 3000
    adapters.load(known, "folder")
    assert adapters.find(known).name == known
    with pytest.raises(InvalidRequest, match=r"LoRA u{128}\.\.\. is not supported, we currently "):
        adapters.find(unknown)
    with pytest.raises(InvalidRequest, match=r"there is no adapter 'u{128}\.\.\.'$"):
        adapters.unload(unknown)


def test_a_bad_adapter_leaves_nothing_behind(adapters: Adapters, memory: Memory) -> None:
    with pytest.raises(InvalidRequest, match=r"'x': layers.3.lora_A.weight does not fit"):
        adapters.load("x", "bad")
    assert not names(adapters) and not memory.held
    adapters.load("x", "good")
    assert names(adapters) == ["x"]


@pytest.mark.parametrize("name", [5, None, b"a", ["a"]])
def test_a_name_must_be_a_string(adapters: Adapters, name: Any) -> None:
    complaint = "the name of an adapter must be a string, got"
    with pytest.raises(InvalidRequest, match=complaint):
        adapters.load(name, "folder")
    with pytest.raises(InvalidRequest, match=complaint):
        adapters.unload(name)
    assert not names(adapters)


def test_a_path_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    complaint = "is no name of a file: it is not valid Unicode"
    with pytest.raises(ConfigError, match=complaint), reachable(tmp_path / "\ud800"):
        pass


def test_no_adapter_leaves_memory_in_vain(
    adapters: Adapters, memory: Memory, told: SimpleQueue[Fetched]
) -> None:
    """Two adapters are being loaded, and only one place could become free: there is too little
    room."""
    a, b = (adapters.load(name, "folder") for name in "ab")
    first, second = ids(1, 2)
    assert adapters.hold(first, a, told.put) and adapters.hold(second, b, told.put)
    memory.may_read.clear()
    memory.num_asked = 0
    with ThreadPoolExecutor(2) as pool:
        loading = [pool.submit(adapters.load, "c", "folder")]
        wait_until(lambda: memory.num_asked == 1)
        adapters.let_go(second, b)
        loading.append(pool.submit(adapters.load, "d", "folder"))
        wait_until(lambda: memory.num_asked == 2)
        memory.may_read.set()
        for future in loading:
            future.result(PATIENCE_S)
    assert memory.held == {a.id, b.id}


def test_more_adapters_than_memory_holds(
    adapters: Adapters, memory: Memory, told: SimpleQueue[Fetched]
) -> None:
    a, b, c = (adapters.load(name, "folder") for name in "abc")
    first, second, third, fourth = ids(1, 2, 3, 4)
    assert adapters.hold(first, c, told.put)
    assert not adapters.hold(second, a, told.put)
    assert told.get(timeout=PATIENCE_S) == Fetched(second, None)
    # both places are held: further adapters wait, but a request for one that is there does not
    assert not adapters.hold(third, b, told.put)
    assert adapters.hold(fourth, a, told.put)
    adapters.let_go(second, a)
    assert told.empty()
    adapters.let_go(fourth, a)
    assert told.get(timeout=PATIENCE_S) == Fetched(third, None)
    assert memory.held == {b.id, c.id} and memory.most == 2


def test_the_adapter_used_least_recently_leaves_memory(
    adapters: Adapters, memory: Memory, told: SimpleQueue[Fetched]
) -> None:
    """One is in use until its last request ends."""
    a, b = (adapters.load(name, "folder") for name in "ab")
    first, second = ids(1, 2)
    assert adapters.hold(first, a, told.put) and adapters.hold(second, b, told.put)
    adapters.let_go(second, b)
    adapters.let_go(first, a)
    c = adapters.load("c", "folder")
    assert memory.held == {a.id, c.id}


@pytest.fixture
def crowded(adapters: Adapters, told: SimpleQueue[Fetched]) -> tuple[Adapter, Adapter, Adapter]:
    """The adapters a, b and c. Requests hold all places: number 1 with b, and many with c, all that
    pass number 0, which waits with a. Number 2 waits behind it, with b."""
    a, b, c = (adapters.load(name, "folder") for name in "abc")
    waiting, first, second, *passing = ids(*range(3 + MOST_PAST))
    assert adapters.hold(first, b, told.put) and adapters.hold(RequestId(1000), c, told.put)
    assert not adapters.hold(waiting, a, told.put)
    assert all(adapters.hold(each, c, told.put) for each in passing)
    assert not adapters.hold(second, b, told.put)
    return a, b, c


def test_an_adapter_is_not_kept_out_of_memory_for_ever(
    adapters: Adapters, told: SimpleQueue[Fetched], crowded: tuple[Adapter, Adapter, Adapter]
) -> None:
    a, b, c = crowded
    others = ids(*range(100, 102 + MOST_PAST))
    passing = [each for each in others if adapters.hold(each, c, told.put)]
    assert passing == others[:MOST_PAST]  # as b is not free yet
    assert told.empty()
    adapters.let_go(RequestId(1), b)
    outcomes = [told.get(timeout=PATIENCE_S) for _ in range(3)]
    assert [each.request_id for each in outcomes] == [*others[MOST_PAST:], 0]
    adapters.let_go(RequestId(0), a)
    assert told.get(timeout=PATIENCE_S) == Fetched(RequestId(2), None)


def test_nobody_waits_behind_an_adapter_that_is_no_longer_needed(
    adapters: Adapters,
    memory: Memory,
    told: SimpleQueue[Fetched],
    crowded: tuple[Adapter, Adapter, Adapter],
) -> None:
    a, b, c = crowded
    adapters.unload("b")
    adapters.let_go(RequestId(0), a)
    assert told.get(timeout=PATIENCE_S) == Fetched(RequestId(2), None)
    adapters.let_go(RequestId(1), b)
    assert memory.held == {b.id, c.id}
    adapters.let_go(RequestId(2), b)
    assert memory.held == {c.id}


def test_a_request_that_ends_while_it_waits_is_forgotten(
    adapters: Adapters, memory: Memory, told: SimpleQueue[Fetched]
) -> None:
    a, b, c = (adapters.load(name, "folder") for name in "abc")
    first, second, third, fourth = ids(1, 2, 3, 4)
    assert adapters.hold(first, b, told.put) and adapters.hold(second, c, told.put)
    assert not adapters.hold(third, a, told.put)
    adapters.let_go(third, a)
    adapters.let_go(first, b)
    adapters.let_go(second, c)
    memory.may_read.clear()
    assert not adapters.hold(fourth, a, told.put)
    adapters.let_go(fourth, a)  # while its adapter is read
    memory.may_read.set()
    adapters.close()
    assert told.empty()


def test_unloading_waits_for_the_requests_that_hold_an_adapter(
    adapters: Adapters, memory: Memory, told: SimpleQueue[Fetched]
) -> None:
    old = adapters.load("a", "folder")
    (first,) = ids(1)
    assert adapters.hold(first, old, told.put)
    adapters.unload("a")
    assert not names(adapters) and memory.held == {old.id}
    new = adapters.load("a", "folder")
    assert new.id != old.id
    adapters.let_go(first, old)
    assert memory.held == {new.id}
    with pytest.raises(InvalidRequest, match="there is no adapter 'b'"):
        adapters.unload("b")


def test_files_that_were_written_again_are_not_taken_for_the_same_adapter(
    adapters: Adapters, memory: Memory, told: SimpleQueue[Fetched]
) -> None:
    """Cached prefixes have the keys and values of the former one."""
    a: Adapter = adapters.load("a", "folder")
    for name in "bc":
        adapters.load(name, "folder")  # a leaves the pool
    memory.files = 2
    assert not adapters.hold(RequestId(1), a, told.put)
    assert "files have changed since it was loaded" in str(told.get(timeout=PATIENCE_S).error)
    adapters.unload("a")
    again = adapters.load("a", "folder")
    assert again.id != a.id
    assert adapters.hold(RequestId(2), again, told.put)


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        (ConfigError("q_proj is gone"), InvalidRequest, "adapter 'a': q_proj is gone"),
        (OSError("the disk is gone"), EngineFailure, "could not be read: the disk is gone"),
    ],
)
def test_files_that_have_gone_bad_fail_the_requests_that_wait(
    failure: Exception,
    kind: type[Exception],
    words: str,
    adapters: Adapters,
    memory: Memory,
    told: SimpleQueue[Fetched],
) -> None:
    a: Adapter = adapters.load("a", "folder")
    for name in "bc":
        adapters.load(name, "folder")  # a leaves the pool
    memory.fails = failure
    assert not adapters.hold(RequestId(1), a, told.put)
    error = told.get(timeout=PATIENCE_S).error
    assert isinstance(error, kind) and words in str(error)
    memory.fails = None
    assert not adapters.hold(RequestId(2), a, told.put)
    assert told.get(timeout=PATIENCE_S) == Fetched(RequestId(2), None)
