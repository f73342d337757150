"""Which nodes there are, according to options and launchers, and what is refused."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.parallel.nodes import read_secret, with_environment
from minisgl_backend.parallel.place import RankPlace
from minisgl_backend.parallel.rendezvous import is_loopback, listen_at
from minisgl_backend.precheck import check_options
from minisgl_backend.tensor_parallel import with_own
from minisgl_check.machines import free_port

LEADER_WORKER_SET = {
    "LWS_LEADER_ADDRESS": "minisgl-0.minisgl.default",
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
}
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
    "WORLD_SIZE": "12",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "2",
    "RANK": "8",
    "LOCAL_RANK": "0",
}


@pytest.mark.parametrize(
    ("environment", "given", "expected"),
    [
        ({}, {}, (None, None, None)),
        ({"MASTER_ADDR": "a", "RANK": "3"}, {}, (None, None, None)),
        (LEADER_WORKER_SET, {}, (2, 1, "minisgl-0.minisgl.default:29500")),
        ({**LEADER_WORKER_SET, "MASTER_PORT": "7"}, {}, (2, 1, "minisgl-0.minisgl.default:7")),
        (LEADER_WORKER_SET, {"nnodes": 1}, (1, 0, None)),
        ({**LEADER_WORKER_SET, "LWS_GROUP_SIZE": "1"}, {}, (1, 0, None)),
        (
            LEADER_WORKER_SET,
            {"rendezvous": "b:5", "node_rank": 0},
            (2, 0, "b:5"),
        ),
        (TORCHRUN, {}, (3, 2, "10.0.0.1:1234")),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "4", "NODE_RANK": "3"}, {}, (4, 3, "10.0.0.1:1234")),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "::5"}, {}, (2, 0, "[::5]:29500")),
        ({"NODE_RANK": "1"}, {"nnodes": 2, "rendezvous": "c:1"}, (2, 1, "c:1")),
        ({"NNODES": "2"}, {}, (2, 0, None)),
    ],
)
def test_places_from_variables_of_launchers(
    environment: dict[str, str], given: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    found = with_environment(EngineOptions(**given), environment)
    assert (found.nnodes, found.node_rank, found.rendezvous) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"NNODES": "two"}, "the variable NNODES must be a number, got 'two'"),
        ({**LEADER_WORKER_SET, "LWS_WORKER_INDEX": "-1"}, "LWS_WORKER_INDEX must be a number"),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun itself listens at"),
    ],
)
def test_malformed_variables_of_launchers(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_environment(EngineOptions(), environment)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"node_rank": 1}, "node_rank=1 needs nnodes of 2 and more"),
        ({"node_secret_file": "x"}, "node_secret_file is for nnodes of 2 and more"),
        ({"nnodes": 2}, "nnodes=2 needs rendezvous, HOST:PORT of node 0"),
        ({"nnodes": 2, "node_rank": 2, "rendezvous": "a:1"}, "node_rank=2 must be below nnodes=2"),
        ({"nnodes": 2, "rendezvous": "a"}, "rendezvous must be HOST:PORT, got 'a'"),
        ({"nnodes": 2, "rendezvous": "a:1"}, "size=1 must be a multiple of nnodes=2"),
        (
            {"nnodes": 2, "rendezvous": "a:1", "tensor_parallel_size": 3},
            "size=3 must be a multiple of nnodes=2",
        ),
        (
            {
                "nnodes": 2,
                "rendezvous": "a:1",
                "tensor_parallel_size": 2,
                "data_parallel_size": 2,
            },
            "nnodes=2 does not go with data_parallel_size of 2 and more",
        ),
        (
            {
                "nnodes": 2,
                "rendezvous": "a:1",
                "tensor_parallel_size": 2,
                "comm": "cuda",
            },
            "comm=cuda is for the GPUs of one machine",
        ),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(EngineOptions(**given), "cuda")


def test_an_engine_is_on_node_0() -> None:
    options = EngineOptions(
        tensor_parallel_size=2, nnodes=2, node_rank=1, rendezvous="127.0.0.1:1", device="cpu"
    )
    with pytest.raises(ConfigError, match="node_rank=1: this machine follows node 0"):
        build_engine(options)


def test_a_secret_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  of at least 16 bytes \n")
    options = EngineOptions(nnodes=2, rendezvous="10.0.0.1:5")
    environment = {"MINISGL_NODE_SECRET": "another of 16 bytes\n"}
    assert read_secret(options, environment) == b"another of 16 bytes"
    given = replace(options, node_secret_file=str(file))
    assert read_secret(given, environment) == b"of at least 16 bytes"
    assert read_secret(replace(options, rendezvous="127.0.0.2:5"), {}) == b""
    with pytest.raises(ConfigError, match="so the nodes need a secret"):
        read_secret(options, {})
    with pytest.raises(ConfigError, match="must have at least 16 bytes, it has 5"):
        read_secret(options, {"MINISGL_NODE_SECRET": "short"})


def test_loopback_addresses() -> None:
    hosts = ("127.0.0.1", "127.3.0.1", "::1", "localhost", "10.0.0.1", "0.0.0.0", "localhost.de")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 3


def test_a_place_on_several_nodes() -> None:
    place = RankPlace.first(8, "10.0.0.1:5", num_nodes=2)
    assert (place.local_size, place.is_one_host) == (4, False)
    assert RankPlace.first(8, None).is_one_host


def test_a_node_keeps_its_own_model_path_and_place() -> None:
    told = EngineOptions(
        model="/theirs", page_size=32, comm="gloo", nnodes=2, rendezvous="a:1", node_rank=0
    )
    own = EngineOptions(model="/ours", nnodes=2, rendezvous="b:1", node_rank=1)
    expected = replace(told, model="/ours", rendezvous="b:1", node_rank=1)
    assert with_own(told, own) == expected
    assert with_own(told, replace(own, page_size=32)) == expected
    with pytest.raises(ConfigError, match="option num_pages is 5 on node 1, and auto on node 0"):
        with_own(told, replace(own, num_pages=5))


def test_a_node_need_not_have_the_adapters_that_node_0_reads() -> None:
    told = EngineOptions(enable_lora=True, nnodes=2)
    own = replace(
        told,
        lora_modules="a=/ours/a",
        multi_lora="/ours.json",
        lora_task_ids="1=a",
        node_rank=1,
    )
    assert with_own(told, own) == replace(told, node_rank=1)


def test_a_name_may_come_late_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod starts before the cluster's name service knows it."""
    look_up, failures = socket.getaddrinfo, 2

    def late(host: str, *others: Any, **named: Any) -> Any:
        nonlocal failures
        if host == "node-0.late" and failures:
            failures -= 1
            raise socket.gaierror(socket.EAI_NONAME, "not yet")
        return look_up("127.0.0.1", *others, **named)

    monkeypatch.setattr("minisgl_backend.parallel.rendezvous._LOOK_UP_EVERY_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", late)
    port = free_port("127.0.0.1")
    with pytest.raises(ConfigError, match="there is no host of this name"):
        listen_at(RankPlace.first(2, f"node-0.late:{port}"))
    with listen_at(RankPlace.first(2, f"node-0.late:{port}", num_nodes=2)) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
    assert failures == 0
