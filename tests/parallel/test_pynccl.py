"""What our own NCCL communicator tells the library, here one that only takes notes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.parallel import pynccl
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.pynccl import ID_BYTES, Nccl, PyNcclGroup, load_nccl
from tests.parallel.threads import on_ranks

STREAM = 0x57
COMMUNICATOR = 0xC0
NAME = bytes(range(ID_BYTES))


class Function:
    """A C function of the library: records its name and arguments, returns its result."""

    def __init__(self, library: Library, name: str):
        self.restype: Any = None
        self.argtypes: list[Any] = []
        self._library = library
        self._name = name

    def __call__(self, *arguments: Any) -> Any:
        library = self._library
        if self._name == "ncclGetErrorString":
            return b"out of order"
        assert not self.argtypes or len(arguments) == len(self.argtypes)
        if self._name == "ncclGetUniqueId":
            arguments[0]._obj.internal[:] = NAME
        if self._name == "ncclCommInitRank":
            communicator, size, name, rank = arguments
            communicator._obj.value = COMMUNICATOR
            library.calls.append((self._name, size, bytes(name), rank))
        else:
            library.calls.append((self._name, *map(_plain, arguments)))
        return library.result


class Library:
    """Stands for libnccl; every name is a function."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = 0
        self._functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        return self._functions.setdefault(name, Function(self, name))


def _plain(argument: Any) -> Any:
    return argument.value if isinstance(argument, (ctypes.c_void_p, ctypes.c_size_t)) else argument


def group_over(library: Any, host: Group) -> PyNcclGroup:
    return PyNcclGroup(Nccl(library), host, lambda: STREAM)


def test_all_ranks_join_the_communicator_of_rank_0() -> None:
    def work(host: Group) -> list[tuple[Any, ...]]:
        library = Library()
        group = group_over(library, host)
        assert (group.rank, group.size) == (host.rank, 3)
        assert group.least([group.rank, -group.rank]) == [0, -2]
        return library.calls

    first, *others = on_ranks(3, work)
    assert [name for name, *_ in first] == ["ncclGetUniqueId", "ncclCommInitRank"]
    joined = [first[-1], *(call for (call,) in others)]
    assert joined == [("ncclCommInitRank", 3, NAME, rank) for rank in range(3)]


def test_collectives_are_launched_on_the_current_stream() -> None:
    x = torch.ones(2, 5, dtype=torch.bfloat16)

    def work(host: Group) -> None:
        library = Library()
        group = group_over(library, host)
        library.calls.clear()
        place = x.data_ptr()

        assert group.all_reduce(x) is x
        assert library.calls.pop() == (
            "ncclAllReduce",
            place,
            place,
            10,
            9,
            0,
            COMMUNICATOR,
            STREAM,
        )
        ids = torch.ones(4, dtype=torch.int32)
        assert group.broadcast(ids) is ids
        place = ids.data_ptr()
        assert library.calls.pop() == ("ncclBroadcast", place, place, 4, 2, 0, COMMUNICATOR, STREAM)
        assert group.all_gather(x).shape == (2, *x.shape)
        name, source, _, *rest = library.calls.pop()
        assert (name, source, *rest) == ("ncclAllGather", x.data_ptr(), 10, 9, COMMUNICATOR, STREAM)

    on_ranks(2, work)


def test_sums_of_a_few_mb_go_through_registered_memory() -> None:
    def work(host: Group) -> None:
        library = Library()
        group = group_over(library, host)
        group.register_buffer(lambda size: torch.zeros(size, dtype=torch.uint8))
        name, communicator, address, size, _, flags = library.calls.pop()
        assert (name, communicator, size, flags) == (
            "ncclCommWindowRegister",
            COMMUNICATOR,
            2**24,
            1,
        )
        for num_rows, is_registered in ((1, False), (255, False), (256, True), (8192, False)):
            x = torch.randn(num_rows, 2048).bfloat16()
            before = x.clone()
            assert group.all_reduce(x) is x
            assert torch.equal(x, before)  # the library adds nothing
            _, source, target, count, *_ = library.calls.pop()
            assert source == target == (address if is_registered else x.data_ptr())
            assert count == x.numel()

    on_ranks(2, work)


def test_where_one_rank_has_no_registered_memory_none_uses_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work(host: Group) -> None:
        def allocate(size: int) -> Tensor:
            if host.rank == 1:
                raise RuntimeError("out of memory")
            return torch.zeros(size, dtype=torch.uint8)

        library = Library()
        group = group_over(library, host)
        group.register_buffer(allocate)
        x = torch.zeros(1024, 2048)
        group.all_reduce(x)
        assert library.calls.pop()[1] == x.data_ptr()

    on_ranks(2, work)
    assert "out of memory" in caplog.text
    assert "another rank has none" in caplog.text


def test_a_group_is_left_once() -> None:
    def work(host: Group) -> None:
        library = Library()
        group = group_over(library, host)
        library.calls.clear()
        group.leave()
        group.leave()
        assert library.calls == [("ncclCommAbort", COMMUNICATOR)]
        with pytest.raises(EngineFailure, match="the ranks have parted"):
            group.all_reduce(torch.ones(1))

    on_ranks(2, work)


def test_an_error_names_the_function_and_the_cause() -> None:
    library = Library()
    library.result = 4
    untyped: Any = library
    with pytest.raises(RuntimeError, match="ncclGetUniqueId: out of order"):
        Nccl(untyped).new_id()


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pynccl, "_LIBRARY", "libnccl-that-is-not-there.so")
    with pytest.raises(ConfigError, match="pip install nvidia-nccl"):
        load_nccl()
