"""Other machines of a tensor-parallel group, as far as one machine can play them.

Knows the command of a node other than 0, and the kernel's network namespaces: a ``Machine`` has a
network of its own, and a cable to this one that can be pulled. Making one takes root and ``ip``
(iproute2). Without a machine, a node is just another process of this one. Must not know node 0's
server, or faults.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from minisgl_backend.death_signal import asking_for
from minisgl_backend.errors import EngineFailure
from minisgl_backend.loopback import open_local
from minisgl_backend.parallel.nodes import SECRET_VARIABLE
from minisgl_check.processes import children_of, is_rank
from minisgl_check.waiting import wait_until

_END_S: Final = 60.0


class Machine:
    """A network namespace at the other end of a cable. ``address`` is this machine's end."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    @property
    def command(self) -> Sequence[str]:
        """The prefix of a command that runs there."""
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        """Cut the cable: no packet arrives on either side, and neither side is told."""
        _ip("link", "set", self.name, "down")

    def plug(self) -> None:
        """Mend the cable."""
        _ip("link", "set", self.name, "up")


def can_have_machines() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"minisgl{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    _ip("netns", "del", name)
    return True


@contextmanager
def machine() -> Iterator[Machine]:
    """Another machine, with a cable to this one. Raises ``EngineFailure`` if there can be none."""
    name = f"minisgl{secrets.token_hex(3)}"
    # a network of two addresses, from the range reserved for network tests
    number = 4 * secrets.randbelow(2**15) + 1
    ours, theirs = (
        f"198.{18 + n // 2**16}.{n // 256 % 256}.{n % 256}" for n in (number, number + 1)
    )
    _ip("netns", "add", name)
    try:
        _ip("link", "add", name, "type", "veth", "peer", "name", "cable", "netns", name)
        _ip("addr", "add", f"{ours}/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "addr", "add", f"{theirs}/30", "dev", "cable")
        _ip("-n", name, "link", "set", "cable", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield Machine(name, ours)
    finally:
        with suppress(EngineFailure):  # its end of the cable may be gone with the namespace
            _ip("link", "del", name)
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise EngineFailure(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class OtherNode:
    """The process of node 1, started with ``minisgl serve``."""

    def __init__(
        self,
        rendezvous: str,
        *arguments: str,
        machine: Machine | None = None,
        secret: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``arguments`` are more options of the command."""
        self.rendezvous = rendezvous
        command = [sys.executable, "-m", "minisgl_backend.cli", "serve", "--nnodes=2"]
        command += ["--node-rank=1", f"--rendezvous={rendezvous}", "--health-port=0", *arguments]
        own = {} if secret is None else {SECRET_VARIABLE: secret}
        self._log, path = tempfile.mkstemp()
        os.unlink(path)
        # ``ip netns exec`` becomes the command, so this is the process of the node itself
        self._process = subprocess.Popen(
            [*(machine.command if machine else ()), *command],
            env={**os.environ, **own, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=asking_for(signal.SIGKILL),  # at the end of the thread that starts it
        )

    @property
    def pid(self) -> int:
        """The process id of the node, not of its ranks."""
        return self._process.pid

    @property
    def log(self) -> str:
        """Its output so far."""
        return os.pread(self._log, 2**20, 0).decode(errors="replace")

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return [pid for pid in children_of(self.pid) if is_rank(pid)]

    def serves(self) -> bool:
        """Whether its ranks have loaded, and follow."""
        log = self.log
        return log.rfind("serving:") > log.rfind("the group has ended")

    def health(self, path: str = "/ready") -> tuple[int, dict[str, Any]]:
        """What its health port answers; only for a node on this machine."""
        address = self.log.partition("http://")[2].partition("/")[0]
        try:
            with open_local(f"http://{address}{path}", timeout_s=10) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def signal(self, number: int) -> None:
        """Send a signal to the node itself."""
        self._process.send_signal(number)

    def freeze(self) -> list[int]:
        """Stop all its processes, as if the machine stood still; returns the ids of its ranks."""
        ranks = self.ranks()
        for pid in (self.pid, *ranks):
            os.kill(pid, signal.SIGSTOP)
        return ranks

    def wait(self) -> int:
        """Wait until it ends; returns the exit code. Raises ``EngineFailure`` if it does not."""
        if not wait_until(lambda: self._process.poll() is not None, _END_S):
            raise EngineFailure("node 1 does not end")
        return self._process.wait()

    def close(self) -> None:
        """End it at once, and its ranks with it."""
        self._process.kill()
        self._process.wait()
        os.close(self._log)


def free_port(host: str) -> int:
    """A port of this machine that is free now."""
    with socket.create_server((host, 0)) as found:
        return int(found.getsockname()[1])
