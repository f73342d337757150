"""Options that the commands share: where to ask, and the parameters of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from minisgl_client.client import AsyncClient, Client
from minisgl_client.errors import InvalidArgument
from minisgl_client.wire import INPUTS, LISTS

_Command = TypeVar("_Command", bound=Callable[..., Any])


def server_options(command: _Command) -> _Command:
    """``url``, ``ensemble`` and ``timeout_s``."""
    for option in (
        click.option("--timeout-s", type=float, help="of an answer as a whole"),
        click.option(
            "--ensemble",
            default="minisgl",
            show_default=True,
            help="the model in Triton, not a batched one",
        ),
        click.option(
            "--url",
            default="localhost:8001",
            show_default=True,
            envvar="MINISGL_URL",
            show_envvar=True,
            help="HOST:PORT of gRPC, or an http:// address",
        ),
    ):
        command = option(command)
    return command


_Client = TypeVar("_Client", Client, AsyncClient)


def client_of(kind: Callable[..., _Client], **settings: Any) -> _Client:
    """A client with the settings of ``server_options``; a wrong one is wrong usage."""
    try:
        return kind(**settings)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None


def parameter_options(*, max_tokens: int) -> Callable[[_Command], _Command]:
    """The parameters used most, and all others by ``--param``; ``given`` gathers them."""

    def decorate(command: _Command) -> _Command:
        for option in (
            click.option(
                "-p",
                "--param",
                "others",
                multiple=True,
                metavar="NAME=VALUE",
                callback=lambda _context, _option, texts: parameters_of(texts),
                help="any parameter of the server; lists and objects as JSON",
            ),
            click.option("--stop", multiple=True, metavar="TEXT", help="may be repeated"),
            click.option("--seed", type=int, help="seed of the random numbers"),
            click.option("--top-k", type=int),
            click.option("--top-p", type=float),
            click.option("--temperature", type=float, help="0 is greedy; 1 if absent"),
            click.option("--max-tokens", default=max_tokens, show_default=True),
        ):
            command = option(command)
        return command

    return decorate


def given(
    max_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: Sequence[str],
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """The parameters of the running command's options, by name.

    Raises ``click.UsageError`` if ``--param`` contradicts another option.
    """
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": list(stop) or None,
    }
    context = click.get_current_context()
    for name, value in others.items():
        if name not in options or context.get_parameter_source(name) is ParameterSource.DEFAULT:
            continue
        if options[name] != ([value] if name in LISTS and isinstance(value, str) else value):
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} and --param {name} have different values")
    return {name: value for name, value in {**options, **others}.items() if value is not None}


def parameters_of(texts: Sequence[str]) -> dict[str, Any]:
    """The values of NAME=VALUE texts; raises ``click.BadParameter``."""
    values: dict[str, Any] = {}
    for name, value in map(_parameter, texts):
        if name in values and values[name] != value:
            raise click.BadParameter(f"{name} has two values")
        values[name] = value
    return values


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    if name in ("prompt", "messages", "request_id"):  # the command's to say
        raise click.BadParameter(f"{name} is no parameter")
    if INPUTS.get(name) == "BYTES" and not (name in LISTS and value.startswith("[")):
        return name, value  # text as it is, though it may look like a number
    try:
        return name, json.loads(value)
    except ValueError:
        if name in INPUTS:
            raise click.BadParameter(f"{name}: {value!r} is no value for it") from None
        return name, value
