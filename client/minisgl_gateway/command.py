"""`minisgl gateway`: the APIs of OpenAI and Anthropic, and a page to chat with, in front of Triton.

Knows options, keys as they are given, and the process that listens. Must not know routes.
"""

from __future__ import annotations

import gc
import ipaddress
import logging
import math
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast, get_args

import click
import uvicorn
from minisgl_client.errors import InvalidArgument

from minisgl_gateway.dialects.base import DialectName
from minisgl_gateway.gateway_options import GatewayOptions

_SEND_BUFFER_BYTES: Final = 64 * 2**10
"""Small, so that a client that does not read is noticed soon."""
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_KEEP_ALIVE_S: Final = 75
"""How long a connection may wait for its next request. Proxies such as nginx and load balancers of
clouds keep theirs for 60 s, and lose a request that they send into one that is being closed."""


class _Seconds(click.FloatRange):
    """A time of 0.1 s to a day; NaN, which is in every range, is refused."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail("not a number", param, ctx)
        return seconds


_DEFAULTS: Final = GatewayOptions()
_POSITIVE: Final = click.IntRange(min=1)
_SECONDS: Final = _Seconds(min=0.1, max=86_400)


@click.command()
@click.option("--triton", default=_DEFAULTS.triton, show_default=True, help="gRPC address")
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="gRPC address of one of several servers, repeated for each, in place of --triton",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9000,
    show_default=True,
    help="0 picks a free one",
)
@click.option("--model", default=_DEFAULTS.model, show_default=True, help="the ensemble in Triton")
@click.option("--model-name", metavar="NAME", help="what callers call it  [default: as --model]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="may be repeated; others on the machine can see it, so a file or the "
    "environment variable MINISGL_API_KEYS (separated by blanks) is better",
)
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="one key a line; # begins a comment",
)
@click.option(
    "--admin-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="the same for keys that may also load and unload LoRA adapters",
)
@click.option(
    "--default-max-tokens",
    type=_POSITIVE,
    default=_DEFAULTS.default_max_tokens,
    show_default=True,
    help="of a chat that does not say max_tokens",
)
@click.option(
    "--shorten-max-tokens",
    is_flag=True,
    help="lower a max_tokens that the context has no room for, instead of refusing it",
)
@click.option(
    "--tool-dialect",
    type=click.Choice(["auto", *get_args(DialectName)]),
    default="auto",
    show_default=True,
    help="how the model calls tools; auto: as its chat template shows",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="origin whose web pages may ask, such as https://chat.example.org; repeatable, * for all",
)
@click.option(
    "--max-requests",
    type=_POSITIVE,
    default=_DEFAULTS.max_requests,
    show_default=True,
    help="answers under way at a time, in all",
)
@click.option(
    "--max-requests-per-key",
    type=_POSITIVE,
    default=_DEFAULTS.max_requests_per_key,
    show_default=True,
    help="the same for each key",
)
@click.option(
    "--max-body-bytes", type=_POSITIVE, default=_DEFAULTS.max_body_bytes, show_default=True
)
@click.option(
    "--max-header-bytes",
    type=click.IntRange(min=1024),  # OpenAI's client sends 500 of its own
    default=_DEFAULTS.max_header_bytes,
    show_default=True,
)
@click.option(
    "--max-stored-responses",
    type=click.IntRange(min=0),
    default=_DEFAULTS.max_stored_responses,
    show_default=True,
    help="of /v1/responses, kept in memory for previous_response_id",
)
@click.option(
    "--max-stored-bytes",
    type=click.IntRange(min=0),
    default=_DEFAULTS.max_stored_bytes,
    show_default=True,
    help="of these, as JSON",
)
@click.option(
    "--timeout-s",
    type=_SECONDS,
    default=_DEFAULTS.timeout_s,
    show_default=True,
    help="of a request as a whole",
)
@click.option(
    "--patience-s",
    type=_SECONDS,
    default=_DEFAULTS.patience_s,
    show_default=True,
    help="with a client that neither sends nor reads",
)
@click.option(
    "--drain-timeout-s",
    type=click.IntRange(min=0),
    default=_DEFAULTS.drain_timeout_s,
    show_default=True,
    help="for answers under way at a stop",
)
def gateway(
    host: str,
    port: int,
    model: str,
    model_name: str | None,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    admin_key_file: Path | None,
    tool_dialect: str,
    **others: Any,
) -> None:
    """Serve OpenAI's and Anthropic's APIs and a chat page, in front of a MiniSGL server."""
    _check_filled({"--host": host, "--model": model, "--model-name": model_name})
    keys = _keys_of(api_keys, os.environ.get("MINISGL_API_KEYS"), api_key_file)
    if not keys and not _is_loopback(host):
        raise click.UsageError(f"listening on {host} needs an API key: see --api-key-file")
    options = GatewayOptions(
        model=model,
        model_name=model if model_name is None else model_name,
        api_keys=keys,
        admin_keys=_keys_of((), None, admin_key_file),
        tool_dialect=None if tool_dialect == "auto" else cast(DialectName, tool_dialect),
        **others,
    )
    _check_origins(options.cors_origins, has_keys=bool(keys))
    _check_servers(options.servers, options.triton)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        server = make_server(options)
    except InvalidArgument as error:
        name = "--server" if options.servers else "--triton"
        raise click.UsageError(f"{name}: {error}") from error
    _serve(server, host, port)


def _serve(server: uvicorn.Server, host: str, port: int) -> None:
    """Listen and answer until a signal ends it."""
    try:
        listener = _listen(host, port)
    except OSError as error:
        raise click.UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    except UnicodeError:  # from encoding a name that no host can have
        raise click.UsageError(f"cannot listen on {host}:{port}: no such name") from None
    with listener:
        shown = f"[{host}]" if ":" in host else host
        # once uvicorn runs, it handles these itself, and at the end raises them again for the
        # previous handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, server.handle_exit)
        click.echo(f"ready on http://{shown}:{listener.getsockname()[1]}")
        # what exists by now stays; collections, for which all streams wait, need not look at it
        gc.collect()
        gc.freeze()
        server.run(sockets=[listener])


def _keys_of(given: Sequence[str], variable: str | None, file: Path | None) -> tuple[str, ...]:
    keys: list[str] = []
    if given:
        keys += _checked("--api-key", [key.strip() for key in given])
    if variable is not None:
        if "," in variable:
            raise click.UsageError(
                "MINISGL_API_KEYS has a comma: blanks separate keys, and a key with a comma is for "
                "--api-key-file"
            )
        keys += _checked("MINISGL_API_KEYS", variable.split())
    if file is not None:
        try:
            text = file.read_text("utf-8-sig")
        except (OSError, UnicodeError) as error:
            raise click.UsageError(f"cannot read {file}: {error}") from error
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        keys += _checked(str(file), [line for line in lines if line])
    return tuple(keys)


def _checked(source: str, keys: Sequence[str]) -> Sequence[str]:
    """The keys, if clients can send them; a given source must not leave the gateway open."""
    if not keys or not all(keys):
        raise click.UsageError(f"{source} holds no key, or a blank one")
    if not all(key.isprintable() for key in keys):  # nor are bytes that are not UTF-8
        raise click.UsageError(f"{source} holds a key that is no printable text in UTF-8")
    return keys


def _check_filled(given: Mapping[str, str | None]) -> None:
    """Refuse an empty value, perhaps of a shell variable that is not set."""
    for name, value in given.items():
        if value == "":
            raise click.UsageError(f"{name} must not be empty")


def _check_origins(origins: Sequence[str], *, has_keys: bool) -> None:
    """Check that origins are spelled as browsers do; "*" is allowed only if there are keys."""
    for origin in origins:
        if origin == "*":
            if not has_keys:
                raise click.UsageError("--cors-origin '*' needs an API key: see --api-key-file")
        elif not _ORIGIN.fullmatch(origin):
            raise click.UsageError(f"--cors-origin {origin!r} is not as https://chat.example.org")


def _check_servers(servers: Sequence[str], triton: str) -> None:
    if servers and triton != _DEFAULTS.triton:
        raise click.UsageError("--triton does not go with --server: name each server by --server")
    if len(set(servers)) < len(servers):
        raise click.UsageError("--server names one server twice")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 stands for any free one. Raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def make_server(options: GatewayOptions) -> uvicorn.Server:
    """A server, to be run on a socket: ``server.run(sockets=[listener])``."""
    # here, so that help does not wait for FastAPI
    from minisgl_gateway.app import create_app
    from minisgl_gateway.protocol import protocol_of
    from minisgl_gateway.telemetry import Telemetry

    telemetry = Telemetry()
    config = uvicorn.Config(
        create_app(options, telemetry),
        http=protocol_of(options, telemetry),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=options.drain_timeout_s,
    )
    return uvicorn.Server(config)
