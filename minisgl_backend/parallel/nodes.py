"""Which machines an engine's ranks are spread over, and the secret that authenticates them.

Knows options, and the variables by which launchers tell a process its place: those of PyTorch's
``torchrun`` and similar launchers, and those of Kubernetes' LeaderWorkerSet. Must not know
processes or sockets. Options take precedence over variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from minisgl_backend.addresses import at_port
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.file_names import reachable
from minisgl_backend.parallel.place import host_and_port
from minisgl_backend.parallel.rendezvous import is_loopback

SECRET_VARIABLE: Final = "MINISGL_NODE_SECRET"
_LEAST_SECRET_BYTES: Final = 16
_DEFAULT_PORT: Final = "29500"
"""PyTorch's default port."""
_AGENT_VARIABLE: Final = "TORCHELASTIC_USE_AGENT_STORE"
_PORT_VARIABLE: Final = "MASTER_PORT"


def with_environment(options: EngineOptions, environment: Mapping[str, str]) -> EngineOptions:
    """The options, with those about nodes taken from the environment if they are not given.

    Raises ``ConfigError`` if a variable is malformed, or if several nodes have no place to meet.
    """
    num_nodes, node, address = options.nnodes, options.node_rank, options.rendezvous
    if num_nodes is None:
        num_nodes = _number(environment, "LWS_GROUP_SIZE", "NNODES", "GROUP_WORLD_SIZE")
    if num_nodes is None and "LOCAL_WORLD_SIZE" in environment:
        num_ranks = _number(environment, "WORLD_SIZE")
        per_node = _number(environment, "LOCAL_WORLD_SIZE")
        num_nodes = num_ranks // per_node if num_ranks and per_node else None
    if num_nodes is None and node is None:
        return options
    if (num_nodes or 1) > 1:
        if node is None:
            node = _number(environment, "LWS_WORKER_INDEX", "NODE_RANK", "GROUP_RANK") or 0
        if address is None:
            address = _address(environment)
    return replace(options, nnodes=num_nodes or 1, node_rank=node or 0, rendezvous=address)


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """The number in the first of these variables that is set."""
    for name in names:
        text = environment.get(name, "")
        if text:
            if not text.isdecimal():
                raise ConfigError(f"the variable {name} must be a number, got {text!r}")
            return int(text)
    return None


def _address(environment: Mapping[str, str]) -> str | None:
    host = environment.get("LWS_LEADER_ADDRESS") or environment.get("MASTER_ADDR")
    if not host:
        return None
    if environment.get(_AGENT_VARIABLE) == "True":
        raise ConfigError(
            f"torchrun itself listens at {_PORT_VARIABLE}: give --rendezvous another port"
        )
    port = environment.get(_PORT_VARIABLE) or _DEFAULT_PORT
    return at_port(host, port)


def check_nodes(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if what the options say about nodes is incomplete or contradictory, or
    does not go with other options."""
    num_nodes = options.nnodes or 1
    if num_nodes == 1:
        if options.node_rank:
            raise ConfigError(f"option node_rank={options.node_rank} needs nnodes of 2 and more")
        if options.node_secret_file is not None:
            raise ConfigError("option node_secret_file is for nnodes of 2 and more")
        return
    if (options.node_rank or 0) >= num_nodes:
        raise ConfigError(f"option node_rank={options.node_rank} must be below nnodes={num_nodes}")
    if options.rendezvous is None:
        raise ConfigError(f"option nnodes={num_nodes} needs rendezvous, HOST:PORT of node 0")
    host_and_port(options.rendezvous)
    if options.data_parallel_size > 1:
        raise ConfigError(
            f"option nnodes={num_nodes} does not go with data_parallel_size of 2 and more: start a "
            "server for each group of nodes"
        )


def read_secret(options: EngineOptions, environment: Mapping[str, str]) -> bytes:
    """The secret of the group; empty if there is none and only this machine can reach the nodes.

    Raises ``ConfigError`` if it is missing, cannot be read or is too short.
    """
    given = environment.get(SECRET_VARIABLE, "").strip().encode()
    source = f"the variable {SECRET_VARIABLE}"
    if options.node_secret_file is not None:
        source = options.node_secret_file
        try:
            with reachable(Path(source)) as place:
                given = place.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"node_secret_file {source}: {error.strerror}") from None
    elif not given:
        assert options.rendezvous is not None
        host, _ = host_and_port(options.rendezvous)
        if is_loopback(host):
            return b""
        raise ConfigError(
            f"other machines can reach rendezvous {options.rendezvous}, so the nodes need a "
            f"secret: node_secret_file, or the variable {SECRET_VARIABLE}"
        )
    if len(given) < _LEAST_SECRET_BYTES:
        raise ConfigError(
            f"the secret in {source} must have at least {_LEAST_SECRET_BYTES} bytes, it has "
            f"{len(given)}"
        )
    return given
