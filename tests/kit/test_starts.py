"""Servers that crash in their start are started again, with a fake binary."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.server.process import BrokenStart, TritonServer
from minisgl_kit.starts import ready
from tests.unit.server.test_start import fake_server, start

CRASHES = """
with open({starts!r}, "a") as starts:
    print(file=starts)
    crashes = starts.tell() <= {num_crashes}
if crashes:
    os.kill(os.getpid(), signal.SIGABRT)
"""


@pytest.fixture
def servers() -> list[TritonServer]:
    return []


def begun(folder: Path, servers: list[TritonServer], *, num_crashes: int) -> TritonServer:
    """A server that is ready at last; ``servers`` gets all of them."""
    starts = str(folder / "starts")
    binary = fake_server(folder, CRASHES.format(starts=starts, num_crashes=num_crashes))

    def begin() -> TritonServer:
        servers.append(start(binary))
        return servers[-1]

    return ready(begin, within_s=30, first_pause_s=0.01)


def test_a_server_is_started_until_one_is_ready(
    tmp_path: Path, servers: list[TritonServer]
) -> None:
    server = begun(tmp_path, servers, num_crashes=4)
    assert server is servers[-1] and len(servers) == 5
    assert not any(crashed.directory.exists() for crashed in servers[:-1])
    assert len({one.shared_memory_prefix for one in servers}) == 5
    server.kill()


def test_a_server_that_always_crashes_is_an_error(
    tmp_path: Path, servers: list[TritonServer]
) -> None:
    with pytest.raises(BrokenStart, match="ended with code -6"):
        begun(tmp_path, servers, num_crashes=5)
    assert len(servers) == 5
    assert not any(crashed.directory.exists() for crashed in servers)


def test_a_server_that_says_what_is_wrong_is_not_started_again(
    tmp_path: Path, servers: list[TritonServer]
) -> None:
    binary = fake_server(tmp_path, "sys.exit(1)")

    def begin() -> TritonServer:
        servers.append(start(binary))
        return servers[-1]

    with pytest.raises(ConfigError, match="ended with code 1"):
        ready(begin, within_s=30)
    (server,) = servers
    assert not server.directory.exists()
