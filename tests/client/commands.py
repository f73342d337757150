"""The commands as processes."""

from __future__ import annotations

import subprocess
import sys

MINISGL = [sys.executable, "-m", "minisgl_backend.cli"]
GREEDY = ["--temperature", "0"]


def run(*words: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """Run a command, with ``stdin`` as its standard input."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*MINISGL, *words], input=data, capture_output=True, timeout=120)
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )
