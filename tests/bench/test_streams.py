"""The streams of `minisgl bench response-path` and `gateway`: their numbers, and refusals."""

from __future__ import annotations

import asyncio

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.errors import EngineFailure
from minisgl_bench import servers
from minisgl_bench.gateway import run_http
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("command", ["response-path", "gateway"])
@pytest.mark.parametrize(
    ("streams", "why"),
    [
        ("a", "'a' is no list of numbers"),
        ("1,2.5", "'1,2.5' is no list of numbers"),
        ("4,0", "'4,0' has a number that is not above 0"),
        ("", "must not be empty"),
    ],
)
def test_a_wrong_number_of_streams_starts_no_server(
    command: str, streams: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TritonServer", None)
    result = CliRunner().invoke(main, ["bench", command, "--streams", streams])
    assert result.exit_code == 2
    assert f"Invalid value for '--streams': {why}" in result.output


def test_a_gateway_that_refuses_ends_the_run() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n")
        await writer.drain()
        writer.write(b"{}")
        await reader.read()
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            asking = run_http(f"{host}:{port}", num_streams=2, num_requests=1, num_tokens=8)
            await asyncio.wait_for(asking, PATIENCE_S)

    with pytest.raises(EngineFailure, match=r"answers HTTP/1\.1 429 Too Many Requests"):
        asyncio.run(ask())
