"""Options of the commands: the server, the parameters of a request, the form of an answer.

Knows the names and types of parameters. Must not know which values the server takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from minisgl_client import strict_json
from minisgl_client.client import AsyncClient, Client
from minisgl_client.errors import InvalidArgument, short
from minisgl_client.parameters import StructuredOutputs
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
    """A client with the settings of ``server_options``; an invalid one counts as wrong usage."""
    try:
        return kind(**settings)
    except InvalidArgument as error:
        raise click.UsageError(str(error)) from None


def parameter_options(*, max_tokens: int) -> Callable[[_Command], _Command]:
    """The parameters used most, and all others through ``--param``; ``given`` gathers them."""

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
            click.option(
                "--temperature",
                type=float,
                help="0 is greedy; mostly 1 if absent",
            ),
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
    """The parameters of the running command's options, by name. ``max_tokens`` has no default
    if ``--param`` gives it, also by its other name or in ``sampling_parameters``, nor with
    ``embed``, which generates nothing.

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
        if name not in options or _is_default(context, name):
            continue
        if options[name] != ([value] if name in LISTS and isinstance(value, str) else value):
            option = name.replace("_", "-")
            raise click.UsageError(f"--{option} and --param {name} have different values")
    within = with_inner(others)
    has_no_default = within.get("embed") is True or names_max_tokens(within)
    if has_no_default and _is_default(context, "max_tokens"):
        options["max_tokens"] = None
    return {name: value for name, value in {**options, **others}.items() if value is not None}


MAX_TOKENS: Final = ("max_tokens", "max_new_tokens")


def with_inner(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters, with those within ``sampling_parameters`` if it is as the server wants it."""
    inner = asked.get("sampling_parameters")
    if isinstance(inner, str):
        try:
            inner = strict_json.loads(inner)
        except (ValueError, RecursionError):
            return asked
    return {**inner, **asked} if isinstance(inner, dict) else asked


def names_max_tokens(within: Mapping[str, Any]) -> bool:
    """Whether parameters, as ``with_inner`` returns them, have ``max_tokens`` by either name."""
    return not within.keys().isdisjoint(MAX_TOKENS)


def with_fitting(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with the commands' own ``fit_max_tokens``, true, unless they have one."""
    return {"fit_max_tokens": with_inner(asked).get("fit_max_tokens", True), **asked}


def refuse_logprobs(asked: Mapping[str, Any]) -> None:
    """Raise ``click.UsageError`` if these parameters ask for logprobs, which a text has no place
    for."""
    of_logprobs = [
        name for name in asked if "logprob" in name.replace("_", "") and asked[name] is not False
    ]
    if of_logprobs:
        raise click.UsageError(
            f"--param {of_logprobs[0]}: only `minisgl generate --jsonl` shows logprobs"
        )


def _is_default(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.DEFAULT


def form_options(command: _Command) -> _Command:
    """The form of the answer; ``form_of`` reads what they name."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--grammar", type=file, help="of a grammar, in Lark or GBNF"),
        click.option(
            "--choice",
            multiple=True,
            metavar="TEXT",
            help="the answer is this text or another; repeat it",
        ),
        click.option("--regex", metavar="PATTERN", help="the whole answer matches it"),
        click.option("--json-schema", type=file, help="the answer is JSON that follows it"),
    ):
        command = option(command)
    return command


def form_of(
    json_schema: Path | None, regex: str | None, choice: Sequence[str], grammar: Path | None
) -> StructuredOutputs | None:
    """What the options of ``form_options`` ask for.

    Raises ``click.UsageError`` for more than one of them, a file that cannot be read, and a schema
    that is not JSON; the server decides whether it is a schema.
    """
    options = {
        "--json-schema": json_schema,
        "--regex": regex,
        "--choice": choice or None,
        "--grammar": grammar,
    }
    said = [name for name, value in options.items() if value is not None]
    if len(said) > 1:
        raise click.UsageError(f"give one of {' and '.join(said)}")
    if json_schema is not None:
        return {"json": _json_of(json_schema)}
    if regex is not None:
        return {"regex": regex}
    if grammar is not None:
        return {"grammar": _text_of(grammar)}
    return {"choice": list(choice)} if choice else None


def with_form(form: StructuredOutputs | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with a form; raises ``click.UsageError`` if they already have one."""
    if form is None:
        return dict(parameters)
    if "structured_outputs" in parameters:
        raise click.UsageError(f"--param structured_outputs stands beside --{_option(form)}")
    return {**parameters, "structured_outputs": form}


def _option(form: StructuredOutputs) -> str:
    (name,) = form
    return "json-schema" if name == "json" else name


def _json_of(file: Path) -> dict[str, Any] | bool:
    try:
        schema = strict_json.loads(_text_of(file))
    except strict_json.Refused as error:
        raise click.UsageError(f"{file}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise click.UsageError(f"{file} is no JSON schema, which is an object, true or false")
    return schema


def _text_of(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{file} must be valid UTF-8: {error}") from None
    except OSError as error:
        raise click.UsageError(f"{file} cannot be read: {error.strerror}") from None


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
    if name in ("prompt", "messages", "request_id"):  # other arguments of the command give these
        raise click.BadParameter(f"{name} is not a parameter")
    if INPUTS.get(name) == "BYTES" and not (name in LISTS and value.startswith("[")):
        return name, value  # text as it is, even if it looks like a number
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        if name in INPUTS:
            raise click.BadParameter(f"{name}: {short(value)} is not a valid value") from None
        return name, value
