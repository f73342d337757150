"""The command `minisgl`: its commands by name, of all packages."""

from __future__ import annotations

import click

from minisgl_backend.cli.lazy import LazyGroup

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
