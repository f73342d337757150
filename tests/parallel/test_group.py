"""Groups of ranks with gloo, and how ranks find each other."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.parallel.connect import choose_comm, connect, open_store
from minisgl_backend.parallel.group import Group, OneRank, least_free_memory
from minisgl_backend.parallel.place import RankPlace
from tests.parallel.threads import on_ranks

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_collectives(dtype: torch.dtype) -> None:
    def work(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        mine = torch.arange(6).view(2, 3).to(dtype) + 10 * group.rank
        return (
            group.all_reduce(mine.clone()),
            group.all_gather(mine),
            group.broadcast(mine.clone()),
        )

    first, second = torch.arange(6).view(2, 3).to(dtype), torch.arange(10, 16).view(2, 3).to(dtype)
    for total, gathered, of_rank_0 in on_ranks(2, work):
        assert torch.equal(total, first + second)
        assert torch.equal(gathered, torch.stack([first, second]))
        assert torch.equal(of_rank_0, first)


def test_one_rank_changes_nothing() -> None:
    group: Group = OneRank()
    x = torch.arange(6).view(2, 3)
    assert group.all_reduce(x) is x and group.broadcast(x) is x
    assert torch.equal(group.all_gather(x), x[None])
    assert group.least([3, -4]) == [3, -4]


def test_the_least_of_each_number() -> None:
    numbers = [[5, -7], [3, -9], [4, 0]]
    assert on_ranks(3, lambda group: group.least(numbers[group.rank])) == [[3, -9]] * 3


@pytest.mark.parametrize(("most", "least"), [(5, 3), (140, 134)])
def test_all_ranks_take_the_least_free_memory(most: int, least: int) -> None:
    free = [most * GIB, least * GIB]
    found = on_ranks(2, lambda group: least_free_memory(group, free[group.rank]))
    assert found == [least * GIB] * 2


@pytest.mark.parametrize(
    ("most", "least", "told"),
    [(8, 4, "2.0 GiB: from 4.0 to 8.0 GiB"), (140, 132, "7.0 GiB: from 132.0 to 140.0 GiB")],
)
def test_ranks_with_too_different_memory_are_refused_with_the_numbers(
    most: int, least: int, told: str
) -> None:
    free = [most * GIB, least * GIB]

    def work(group: Group) -> str:
        with pytest.raises(ConfigError) as caught:
            least_free_memory(group, free[group.rank])
        return str(caught.value)

    first, second = on_ranks(2, work)
    assert f"differs by more than {told}, {most}.0 GiB on rank 0" in first
    assert f"{least}.0 GiB on rank 1" in second


def test_a_silent_rank_ends_the_others_collective() -> None:
    over = threading.Event()

    def work(group: Group) -> None:
        if group.rank == 1:
            over.wait(60)
            return
        with pytest.raises(EngineFailure, match="a rank is lost"):
            group.all_reduce(torch.ones(1))
        over.set()

    on_ranks(2, work, timeout_s=3.0)
    assert over.is_set()


def test_a_place_survives_the_environment() -> None:
    place = RankPlace.first(4, "127.0.0.1:4567").of(3)
    assert (place.rank, place.local_rank, place.size, place.port) == (3, 3, 4, 4567)
    assert RankPlace.from_environment(place.environment()) == place


def test_a_place_as_torchrun_gives_it() -> None:
    """The fourth of eight ranks, the second of two on its host."""
    variables = {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node-0.example",
        "MASTER_PORT": "29500",
    }
    place = RankPlace.from_environment(variables)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 8, 1, 2)
    assert (place.host, place.port) == ("node-0.example", 29500)


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_place_needs_its_variables(variable: str) -> None:
    variables = RankPlace.first(2, "127.0.0.1:4567").environment()
    for wrong in ({}, {variable: "one"}):
        rest = {name: value for name, value in variables.items() if name != variable}
        with pytest.raises(ConfigError, match=variable):
            RankPlace.from_environment({**rest, **wrong})


@pytest.mark.parametrize("address", ["host", "host:", ":123", "host:0", "host:65536", "host:x"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        RankPlace.first(2, address)


def test_two_engines_never_meet() -> None:
    first, second = (open_store(RankPlace.first(2, None), 10) for _ in range(2))
    assert first[0].port != second[0].port
    first[1].set("who", "first")
    assert not second[1].check(["who"])


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = RankPlace.first(2, f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(
            ConfigError, match=r"127\.0\.0\.1:\d+ cannot be used: the port is taken"
        ):
            open_store(place, 5)


def test_a_rank_whose_peers_do_not_come_gives_up() -> None:
    place, store = open_store(RankPlace.first(2, None), 1)
    with pytest.raises(ConfigError, match="the ranks cannot connect by gloo"):
        connect(place, store, "gloo", CPU, timeout_s=1)


def test_a_library_of_another_device_is_refused() -> None:
    cuda = torch.device("cuda")
    two, three = (RankPlace.first(size, None) for size in (2, 3))
    assert choose_comm(None, CPU, two) == "gloo"
    assert choose_comm(None, cuda, three) == "nccl"
    assert choose_comm("pynccl", cuda, two) == "pynccl"
    with pytest.raises(ConfigError, match="comm=nccl does not work on cpu, which has gloo"):
        choose_comm("nccl", CPU, two)
    with pytest.raises(ConfigError, match="gloo does not work on cuda, which has nccl, pynccl, cu"):
        choose_comm("gloo", cuda, two)


@pytest.mark.parametrize("is_near", [False, True])
@pytest.mark.parametrize("is_hopper", [False, True])
def test_own_sums_are_the_default_of_as_many_ranks_as_were_measured(
    is_hopper: bool, is_near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl_backend.parallel.connect.can_start_early", lambda _: is_hopper)
    monkeypatch.setattr("minisgl_backend.packages.import_error", lambda module: None)
    monkeypatch.setattr("minisgl_backend.parallel.connect._reach_each_other", lambda _: is_near)
    cuda = torch.device("cuda")
    chosen = [choose_comm(None, cuda, RankPlace.first(size, None)) for size in (2, 4, 8)]
    fastest = "cuda" if is_hopper and is_near else "nccl"
    assert chosen == [fastest, fastest, "nccl"]


def test_missing_packages_and_other_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If sums by this package's kernels are requested."""
    monkeypatch.setattr("minisgl_backend.parallel.connect.nccl_group", lambda *_: OneRank())
    for is_hopper, text in (
        (False, "comm=cuda needs GPUs of compute capability 9.0 or above"),
        (True, r"comm=cuda needs cuda.bindings \(no module\): pip install cuda-bindings=="),
    ):

        def early(_: torch.device, found: bool = is_hopper) -> bool:
            return found

        monkeypatch.setattr("minisgl_backend.parallel.connect.can_start_early", early)
        monkeypatch.setattr("minisgl_backend.packages.import_error", lambda module: "no module")
        place, store = open_store(RankPlace.first(1, None), 5)
        with pytest.raises(ConfigError, match=text):
            connect(place, store, "cuda", torch.device("cuda"), timeout_s=5)


def test_the_kernels_of_one_host_are_not_for_several() -> None:
    place = RankPlace.first(4, "10.0.0.1:29500", num_nodes=2)
    assert choose_comm(None, torch.device("cuda"), place) == "nccl"
    with pytest.raises(ConfigError, match="comm=cuda is for the GPUs of one machine"):
        choose_comm("cuda", torch.device("cuda"), place)
