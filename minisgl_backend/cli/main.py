"""The command groups; each command lives in a module that is imported only when it is called."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final

import click

from minisgl_backend.errors import ConfigError


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
            command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise click.ClickException(_missing(cmd_name, error)) from error
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what the operator can mend is one line, not a traceback."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error


def _missing(command: str, error: ModuleNotFoundError) -> str:
    extra = _EXTRAS.get(command, "server")
    return f"{command} needs {error.name}: pip install 'minisgl-triton[{extra}]'"


_EXTRAS: Final = {
    "chat": "client",
    "generate": "client",
    "gateway": "gateway",
}
"""The extra of pyproject.toml that a command needs; others need `server`."""

bench = LazyGroup(
    "bench",
    {
        "planner": "minisgl_backend.bench.planner:planner",
        "response-path": "minisgl_backend.bench.response_path:response_path",
        "cancel": "minisgl_backend.bench.cancel:cancel",
        "gateway": "minisgl_backend.bench.gateway:gateway",
        "serve": "minisgl_backend.bench.serve.command:serve",
        "offline": "minisgl_backend.bench.offline:offline",
        "decode": "minisgl_backend.bench.decode:decode",
        "prefill": "minisgl_backend.bench.prefill:prefill",
        "kernels": "minisgl_backend.bench.kernels:kernels",
    },
    help="Measure; every command prints a table and takes --json FILE.",
)

main = LazyGroup(
    "minisgl",
    {
        "serve": "minisgl_backend.cli.serve:serve",
        "gateway": "minisgl_gateway.command:gateway",
        "bench": "minisgl_backend.cli.main:bench",
    },
    help="MiniSGL: LLM serving inside Triton Inference Server.",
)
main = click.version_option(package_name="minisgl-triton")(main)
