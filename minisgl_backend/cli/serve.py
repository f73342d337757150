"""`minisgl serve`: one command from a checkpoint to a Triton endpoint that answers."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from minisgl_backend.cli.options import engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.server.installation import find_installation
from minisgl_backend.server.log import Console
from minisgl_backend.server.process import ServerOptions, TritonServer
from minisgl_backend.server.repository import shipped_repository

_QUESTION = "What is the capital of France?"


@click.command()
@engine_options
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option("--http-port", default=8000, show_default=True, help="0 picks a free one")
@click.option("--grpc-port", default=8001, show_default=True, help="0 picks a free one")
@click.option("--metrics-port", default=8002, show_default=True, help="0 picks a free one")
@click.option("--tritonserver", metavar="PATH", help="another tritonserver than the wheel's")
@click.option("--log-verbose", default=0, show_default=True, help="Triton's own log level")
def serve(
    options: EngineOptions,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    tritonserver: str | None,
    log_verbose: int,
) -> None:
    """Serve a checkpoint through tritonserver until Ctrl-C or SIGTERM."""
    started = time.monotonic()
    console = Console(everything=log_verbose > 0)
    server = TritonServer(
        find_installation(tritonserver),
        shipped_repository(),
        options_as_text(located(options)),
        ServerOptions(
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            log_verbose=log_verbose,
            exit_timeout_s=int(options.drain_timeout_s) + 10,
        ),
        on_log=console.show,
    )
    stopping = _stop_on_signals(server)
    try:
        try:
            server.wait_ready(give_up=stopping.is_set)
        except InterruptedError:
            return
        click.echo(_welcome(server, options, time.monotonic() - started))
        while server.poll() is None and not stopping.wait(0.2):
            pass
        if not stopping.is_set():
            raise click.ClickException(f"tritonserver ended with code {server.poll()}")
    finally:
        server.stop()


def located(options: EngineOptions) -> EngineOptions:
    """The options with absolute folders, fetched from their hub where they are ids.

    The server runs elsewhere, and here the operator sees how far a download has come.
    """
    changes: dict[str, Any] = {}
    for name in ("model", "tokenizer"):
        value = getattr(options, name)
        if value is not None:
            folder = Path(value).expanduser()
            if name == "model" or not folder.is_dir():
                folder = resolve_model(value, options.model_source)
            changes[name] = str(folder.resolve())
    return replace(options, **changes)


def options_as_text(options: EngineOptions) -> dict[str, str]:
    """What differs from the defaults, as the parameters of a config.pbtxt."""
    given = {spec.name: getattr(options, spec.name) for spec in fields(options)}
    defaults = {spec.name: spec.default for spec in fields(options)}
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in given.items()
        if value != defaults[name]
    }


def _stop_on_signals(server: TritonServer) -> threading.Event:
    """Take SIGINT and SIGTERM: the first lets requests drain, a second one does not wait."""
    stopping = threading.Event()

    def forward(number: int, _frame: object) -> None:
        if stopping.is_set():
            server.signal(signal.SIGKILL)
            return
        stopping.set()
        print("stopping; requests in flight may finish", file=sys.stderr)

    signal.signal(signal.SIGINT, forward)
    signal.signal(signal.SIGTERM, forward)
    return stopping


def _welcome(server: TritonServer, options: EngineOptions, seconds: float) -> str:
    host = server.options.host
    return f"""
ready after {seconds:.1f} s, serving {Path(options.model).name}
  HTTP     {server.url()}
  gRPC     {host}:{server.grpc_port}
  metrics  http://{host}:{server.metrics_port}/metrics

Try it:
  curl -s {server.url("/v2/models/minisgl/generate")} -d '{{
    "messages": "[{{\\"role\\": \\"user\\", \\"content\\": \\"{_QUESTION}\\"}}]",
    "max_tokens": 32, "temperature": 0}}'
"""
