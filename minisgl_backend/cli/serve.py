"""`minisgl serve`: one command from a checkpoint to a Triton endpoint that answers.

With several nodes the same command runs on each; those other than node 0 only have ranks. Must not
import torch, so that a wrong option is reported at once; the models' processes load it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import click

from minisgl_backend.cli.options import EngineCommand, engine_options, tritonserver_option
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.nodes import check_nodes, read_secret, with_environment
from minisgl_backend.server.health import HealthServer
from minisgl_backend.server.installation import Installation, find_installation
from minisgl_backend.server.launch import ServerOptions, raise_descriptor_limit
from minisgl_backend.server.log import Console, ConsoleHandler
from minisgl_backend.server.node import FollowingNode
from minisgl_backend.server.options import checked, located, options_as_text, with_modules
from minisgl_backend.server.ports import numeric
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.repository import shipped_repository
from minisgl_backend.server.stop_event import StopEvent
from minisgl_backend.server.supervisor import Supervisor

_QUESTION: Final = "What is the capital of France?"
_LAST_ANSWERS_S: Final = 5
"""Time for the last errors after the drain, in seconds; usually one or two suffice."""
_PORT: Final = click.IntRange(0, 65535)


@click.command(cls=EngineCommand)
@engine_options
@click.option(
    "--lora-module",
    "lora_modules_more",
    multiple=True,
    metavar="NAME=PATH",
    help="one more adapter beside those of --lora-modules; may be given again",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option("--http-port", default=8000, type=_PORT, show_default=True, help="0 picks a free one")
@click.option("--grpc-port", default=8001, type=_PORT, show_default=True, help="0 picks a free one")
@click.option(
    "--metrics-port", default=8002, type=_PORT, show_default=True, help="0 picks a free one"
)
@click.option(
    "--health-port", default=8003, type=_PORT, show_default=True, help="0 picks a free one"
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="let --host be an address that other machines can reach: Triton has no authentication",
)
@tritonserver_option
@click.option(
    "--log-verbose",
    default=0,
    type=click.IntRange(0, 9),
    show_default=True,
    help="Triton's own log level",
)
def serve(
    options: EngineOptions,
    lora_modules_more: tuple[str, ...],
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    health_port: int,
    allow_remote: bool,
    tritonserver: str | None,
    log_verbose: int,
) -> None:
    """Serve a checkpoint through tritonserver until Ctrl-C or SIGTERM.

    With --nnodes, run this on each machine: node 0 serves, the others have a part of the model, and
    use no options of the server but --host and --health-port.
    """
    started = time.monotonic()
    console = Console(everything=log_verbose > 0)
    logging.basicConfig(
        format="%(asctime)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        handlers=[ConsoleHandler(console)],
    )
    logging.getLogger("minisgl_backend").setLevel(logging.INFO)
    if not host:
        raise ConfigError("--host must not be empty; 0.0.0.0 stands for all addresses")
    address = numeric(host)
    server_options = ServerOptions(
        host=address,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_verbose=log_verbose,
        exit_timeout_s=math.ceil(options.drain_timeout_s) + _LAST_ANSWERS_S,
    )
    if not (server_options.is_local or allow_remote):
        raise ConfigError(
            f"other machines can reach --host {host}, and Triton has no authentication: put a proxy"
            " that authenticates in front, or pass --allow-remote"
        )
    options = with_modules(with_environment(options, os.environ), lora_modules_more)
    if options.node_rank:
        _follow(options, HealthServer(address, health_port), console)
        return
    if health_port and health_port in (http_port, grpc_port, metrics_port):
        raise ConfigError(f"--health-port {health_port} is that of another endpoint, too")
    installation = find_installation(tritonserver)
    options = checked(options)
    raise_descriptor_limit()
    health = HealthServer(address, health_port)
    _supervise(options, server_options, installation, health, console, started_s=started)


def _supervise(
    options: EngineOptions,
    server_options: ServerOptions,
    installation: Installation,
    health: HealthServer,
    console: Console,
    *,
    started_s: float,
) -> None:
    """Keep a server running until Ctrl-C or SIGTERM. ``started_s`` is when the command was started,
    by the monotonic clock."""

    def start(server_options: ServerOptions) -> TritonServer:
        return TritonServer(
            installation,
            shipped_repository(),
            options_as_text(options),
            server_options,
            on_log=console.show,
        )

    def welcome(server: TritonServer) -> None:
        seconds = time.monotonic() - started_s
        with suppress(OSError):  # stdout is closed
            click.echo(_welcome(server, health.port, Path(options.model), seconds))

    try:
        supervisors: list[Supervisor] = []

        def kill() -> None:
            for supervisor in supervisors:
                supervisor.server.signal(signal.SIGKILL)

        stopping = _stop_on_signals(kill, console)
        supervisors.append(supervisor := Supervisor(start, server_options))
        health.start(supervisor.health, supervisor.stats)
        supervisor.run(stopping, welcome)
    except EngineFailure as error:
        raise click.ClickException(str(error)) from None
    finally:
        health.close()


def _follow(options: EngineOptions, health: HealthServer, console: Console) -> None:
    """Run a node other than 0 until Ctrl-C or SIGTERM. Raises ``ConfigError``."""
    try:
        check_nodes(options)
        secret = read_secret(options, os.environ)
        options = located(options)
        load_spec(Path(options.model))
        assert options.rendezvous is not None and options.nnodes and options.node_rank
        node = FollowingNode(
            options.rendezvous, options.nnodes, options.node_rank, secret, options_as_text(options)
        )
        stopping = _stop_on_signals(node.kill, console)
        health.start(node.health, node.stats)
        where = f"http://{health.address}/ready"
        console.say(f"node {options.node_rank} of {options.nnodes} has its health at {where}")
        node.run(stopping, options.drain_timeout_s + _LAST_ANSWERS_S)
    finally:
        health.close()


def _stop_on_signals(kill: Callable[[], None], console: Console) -> StopEvent:
    """Handle SIGINT, SIGTERM and SIGHUP: the first drains requests, a second one calls ``kill``."""
    stopping = StopEvent()

    def forward(number: int, _frame: object) -> None:
        if stopping.is_set():
            kill()
            return
        stopping.set()
        console.say("stopping; requests in flight may finish, and a second signal ends them")

    signal.signal(signal.SIGINT, forward)
    signal.signal(signal.SIGTERM, forward)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, forward)
    return stopping


def _welcome(server: TritonServer, health_port: int, model: Path, seconds: float) -> str:
    address = server.options.address
    return f"""
ready after {seconds:.1f} s, serving {model.name}
  HTTP     {server.url()}
  gRPC     {server.grpc_address}
  metrics  http://{address(server.metrics_port)}/metrics
  health   http://{address(health_port)}/ready

Try it:
  {suggestion(server.url("/v2/models/minisgl/generate"), load_spec(model))}
"""


def suggestion(url: str, spec: ModelSpec) -> str:
    """A command that asks the model for what it makes."""
    if not spec.generates:
        return f"""curl -s {url} -d '{{"text_input": "{_QUESTION}", "embed": true}}'"""
    return f"""curl -s {url} -d '{{
    "messages": "[{{\\"role\\": \\"user\\", \\"content\\": \\"{_QUESTION}\\"}}]",
    "max_tokens": 32, "temperature": 0}}'"""
