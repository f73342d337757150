"""A `minisgl bench` command in a process of its own, whose memory is free again when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from minisgl_backend.config import EngineOptions
from minisgl_backend.death_signal import asking_for
from minisgl_backend.server.options import options_as_text


def run_bench(arguments: Sequence[str], *, timeout_s: float | None = None) -> dict[str, Any]:
    """Run the command, which prints its table, and return the content of its ``--json`` file.

    Raises ``click.ClickException`` if it fails (it has then said why) or exceeds the timeout.
    """
    name = f"minisgl bench {arguments[0]}"
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "minisgl_backend.cli", "bench", *arguments]
        try:
            subprocess.run(
                [*command, "--json", str(file)],
                check=True,
                timeout=timeout_s,
                preexec_fn=asking_for(signal.SIGKILL),  # when this process ends
            )
        except subprocess.CalledProcessError as error:
            raise click.ClickException(f"{name} ended with {error.returncode}") from None
        except subprocess.TimeoutExpired:
            raise click.ClickException(f"{name} was not done after {timeout_s:g} s") from None
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def option_arguments(options: EngineOptions) -> list[str]:
    """The options as command-line arguments."""
    given = options_as_text(options)
    return [
        word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
