"""The command `minisgl`, and groups of commands whose modules are imported only when called.

Knows commands only by their names, which each group lists.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Final

import click

from minisgl_backend.cli.interrupt import INTERRUPTED, ended_by_ctrl_c, signals_as_ctrl_c
from minisgl_backend.errors import ConfigError, Overloaded, RequestError

_CANNOT_START: Final = 2
_EXTRAS: Final = {
    "httpx": "client",
    "prompt_toolkit": "client",
    "fastapi": "gateway",
    "prometheus_client": "gateway",
    "pydantic": "gateway",
    "uvicorn": "gateway",
    "matplotlib": "bench",
    "torch": "server",  # some commands import it only when they run
}
"""The extra of pyproject.toml that installs a package; `server` installs the others."""


class LazyGroup(click.Group):
    """A group that knows its commands by ``module:attribute``, so that help stays fast."""

    def __init__(self, name: str, places: Mapping[str, str], help: str) -> None:
        super().__init__(name=name, help=help, no_args_is_help=True)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._places:
            return None
        module, attribute = self._places[cmd_name].split(":")
        try:
            with ended_by_ctrl_c():
                command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            return _unavailable(cmd_name, error)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with its whole first sentence, which click would cut short."""
        rows = []
        for name in self._places:
            command = self.get_command(ctx, name)
            assert command is not None
            rows.append((name, command.get_short_help_str(limit=200)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that ``args`` begin with. For an unknown one, the error names the nearest."""
        name = args[0]
        near = difflib.get_close_matches(name, self._places, n=1)
        if near and name not in self._places and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. A ``ConfigError`` becomes one line and exit code 2, as for wrong usage;
        so do a ``RequestError`` and ``Overloaded``, of a benchmark whose requests the engine cannot
        serve.

        Ctrl-C that the command does not handle ends it with code 130, other signals likewise.
        """
        with signals_as_ctrl_c():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                ctx.exit(INTERRUPTED)
            except (ConfigError, RequestError, Overloaded) as error:
                click.echo(f"Error: {error}", err=True)
                ctx.exit(_CANNOT_START)
            except ModuleNotFoundError as error:  # from what a command imports when it runs
                if error.name not in _EXTRAS:
                    raise
                raise click.ClickException(f"{ctx.invoked_subcommand} {_advice(error)}") from None


def _advice(error: ModuleNotFoundError) -> str:
    extra = _EXTRAS.get(error.name or "", "server")
    return f"needs {error.name}: pip install '.[{extra}]' in a clone"


def _unavailable(name: str, error: ModuleNotFoundError) -> click.Command:
    """The stand-in for a command whose packages are not installed: the help lists it, and when
    called it says what to install."""
    advice = _advice(error)

    def refuse(rest: tuple[str, ...]) -> None:
        raise click.ClickException(f"{name} {advice}")

    return click.Command(
        name,
        callback=refuse,
        params=[click.Argument(["rest"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        add_help_option=False,
        short_help=f"({advice})",
    )


main = LazyGroup(
    "minisgl",
    {
        "serve": "minisgl_backend.cli.serve:serve",
        "generate": "minisgl_client.cli.generate:generate",
        "chat": "minisgl_client.cli.chat:chat",
        "gateway": "minisgl_gateway.command:gateway",
        "bench": "minisgl_bench.command:bench",
        "check": "minisgl_check.command:check",
    },
    help="MiniSGL: LLM serving inside Triton Inference Server.",
)
main = click.version_option(package_name="minisgl-triton")(main)
