"""The streams of `minisgl bench response-path` and `gateway`: their numbers, rates and refusals."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_bench import servers
from minisgl_bench.gateway import HttpExchange, run_http
from minisgl_bench.paced import script_of
from minisgl_bench.response_path import summary
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


def test_streams_that_are_never_busy_together_have_no_rate() -> None:
    script = script_of(DEMO_MODEL)[:8].tolist()
    text = TextStream(load_vocabulary(DEMO_MODEL)).push(script, final=True).text
    event = b"data: " + json.dumps({"choices": [{"text": text}]}).encode()
    short = [
        HttpExchange(8, sent_s, arrived_s=[sent_s + 0.1, sent_s + 0.2], responses=[event, b""])
        for sent_s in (0.0, 0.5)
    ]
    assert summary([[short[0]], [short[0]]])["tokens_per_s"] > 0
    with pytest.raises(ConfigError, match="one of 2 streams ended before another began"):
        summary([[one] for one in short])


def test_a_paced_engine_brings_no_large_libraries() -> None:
    """The servers of many benchmarks and tests have such an engine, and start sooner without."""
    code = (
        "import sys; from minisgl_backend.config import EngineOptions; "
        "from minisgl_bench.paced import paced_engine; "
        f"engine = paced_engine(EngineOptions(model={str(DEMO_MODEL)!r}), step_s=0.01); "
        "engine.close(drain_s=0); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
