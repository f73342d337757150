"""A gateway in a process of its own, in front of a server.

Knows the command `minisgl gateway`. Must not know what is asked.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Final
from urllib.parse import urlsplit

from minisgl_backend.errors import EngineFailure
from minisgl_backend.loopback import open_local

_ANSWER_S: Final = 30.0
_STARTS_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """``url`` is an http:// address without a path."""

    url: str
    process: subprocess.Popen[str]

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return urlsplit(self.url).netloc

    def metric(self, name: str) -> float:
        """A metric without labels."""
        with open_local(f"{self.url}/metrics", timeout_s=_ANSWER_S) as response:
            text = response.read().decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0

    def is_alive(self) -> bool:
        """Whether its health route says so; raises ``OSError`` if there is no answer."""
        try:
            with open_local(f"{self.url}/health", timeout_s=_ANSWER_S) as response:
                return response.status == 200
        except urllib.error.HTTPError:
            return False


@contextmanager
def gateway_of(grpc_address: str, *options: str) -> Iterator[Gateway]:
    """A gateway that listens on a free port; it ends with the block.

    Raises ``EngineFailure`` if it does not start, with its last log line.
    """
    command = [sys.executable, "-m", "minisgl_backend.cli", "gateway", "--triton", grpc_address]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for this process alone
        )
        try:
            found = re.search(r"http://\S+", _first_line(process))
            if found is None:
                raise EngineFailure(f"the gateway does not start: {_last_line(log)}")
            yield Gateway(found[0], process)
        finally:
            process.kill()  # told to end, it would first answer open requests
            process.communicate()


def _first_line(process: subprocess.Popen[str]) -> str:
    """Its first line; empty if it ends before, or is killed after the timeout."""
    assert process.stdout is not None
    patience = threading.Timer(_STARTS_WITHIN_S, process.kill)
    patience.start()
    try:
        return process.stdout.readline()
    finally:
        patience.cancel()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    said = [line.strip() for line in log if line.strip()]
    return said[-1] if said else "it says nothing"
