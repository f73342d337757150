"""Options that several commands share, the engine's among them.

The engine's options are generated from ``EngineOptions``, under the same names with dashes, so that
they are listed only once. Must not know any command, or what an option's value is used for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

import click

from minisgl_backend.config import DEMO_MODEL, EngineOptions, option_type, options_by_subject
from minisgl_backend.errors import ConfigError

_METAVARS: Final = {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: "[true|false]"}

_ALONE_IS_TRUE: Final[dict[str, Any]] = {"is_flag": False, "flag_value": "true"}
"""What makes click take an option without a value."""


class EngineCommand(click.Command):
    """A command with ``engine_options``, which its help lists after its own, by subject."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        with formatter.section("Options"):
            of_engine = {spec.name for spec in fields(EngineOptions)}
            own = [record for name, record in records.items() if name not in of_engine]
            formatter.write_dl(list(filter(None, own)))
        for subject, options in options_by_subject().items():
            with formatter.section(f"Options of the engine: {subject}"):
                of_subject = [records[spec.name] for spec in options]
                formatter.write_dl(list(filter(None, of_subject)))


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a click callback, which then gets an ``EngineOptions`` as its first argument.

    Values are checked by ``EngineOptions.from_mapping``; raises ``ConfigError``.
    """
    names = [spec.name for spec in fields(EngineOptions)]

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in names}
        chosen = {name: value for name, value in given.items() if value is not None}
        for name in chosen:
            if not chosen[name]:  # perhaps from a shell variable that is not set
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty")
        return command(EngineOptions.from_mapping(chosen), *args, **kwargs)

    for spec in reversed(fields(EngineOptions)):
        choices, kind = "|".join(spec.metadata["choices"]), option_type(spec.name)
        with_options = click.option(
            "--" + spec.name.replace("_", "-"),
            spec.name,
            metavar=f"[{choices}]" if choices else _METAVARS[kind],
            **_ALONE_IS_TRUE if kind is bool else {},
            help=f"{spec.metadata['help']}  [default: {_shown(spec.default)}]",
        )(with_options)
    return with_options


tritonserver_option = click.option(
    "--tritonserver",
    metavar="PATH",
    help="another tritonserver than the wheel's; MINISGL_TRITONSERVER may name one, too",
)


def _shown(default: Any) -> str:
    if default is None:
        return "auto"
    if default == DEMO_MODEL:
        return "the demo model"
    return str(default).lower() if isinstance(default, bool) else str(default)
