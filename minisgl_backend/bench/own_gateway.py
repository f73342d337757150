"""A gateway in a process of its own, in front of a server.

Knows the command `minisgl gateway`. Must not know what is asked.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from minisgl_backend.errors import EngineFailure
from minisgl_backend.loopback import open_local

_ANSWER_S: Final = 30.0


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
        """Whether it says so itself."""
        with open_local(f"{self.url}/health", timeout_s=_ANSWER_S) as response:
            return response.status == 200


@contextmanager
def gateway_of(grpc_address: str, *options: str) -> Iterator[Gateway]:
    """A gateway that listens on a free port; it ends with the block.

    Raises ``EngineFailure`` where it does not start.
    """
    command = [sys.executable, "-m", "minisgl_backend.cli", "gateway", "--triton", grpc_address]
    process = subprocess.Popen(
        [*command, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        if found is None:
            raise EngineFailure("the gateway does not start")
        yield Gateway(found[0], process)
    finally:
        process.terminate()
        process.communicate()
