"""`minisgl bench serve` against real servers, over each protocol, and how Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest
from click.testing import CliRunner
from pexpect.fdpexpect import fdspawn

from minisgl_backend.cli.main import main
from minisgl_backend.server.process import TritonServer
from minisgl_bench.serve import command as serve_command
from minisgl_kit.calls import Call, Chunk
from minisgl_kit.targets import OpenAITarget, Refused, Sampling, TritonTarget, chunk_of_event
from tests.bench.test_serve_parts import CONVERSATIONS
from tests.gateway.conftest import gateway_of

pytestmark = pytest.mark.server

PROMPTS = [
    {"prompt": "What is the capital of France?"},
    {"messages": [{"role": "user", "content": "Count from 1 to 5."}], "max_tokens": 6},
    {"input_ids": [5, 6, 7]},
]


def bench(*arguments: str) -> str:
    """The output of the command, which succeeds."""
    result = CliRunner().invoke(main, ["bench", "serve", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def children_of(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_closed_and_open_loops_over_grpc(server: TritonServer, tmp_path: Path) -> None:
    output = bench(
        *("--url", f"127.0.0.1:{server.grpc_port}"),
        *("--concurrency", "1,3", "--rate", "20"),
        *("--requests", "6", "--input-len", "20", "--output-len", "8", "--range-ratio", "0.5"),
        *("--slo", "ttft=60000,tpot=60000,e2e=60000"),
        *("--json", str(tmp_path / "figures.json"), "--plots", str(tmp_path / "plots")),
    )
    assert "time to first token, ms, p50" in output
    rows = rows_of(tmp_path / "figures.json")
    labels = [("concurrency", 1), ("concurrency", 3), ("rate", 20)]
    assert [(row["load"], row["level"]) for row in rows] == labels
    for row in rows:
        assert row["requests"] == 6 and row["errors"] == {}
        # the same lengths at each load, and new tokens that no cache knows
        assert row["input_tokens"] == rows[0]["input_tokens"] <= 6 * 30
        assert row["output_tokens"] == rows[0]["output_tokens"] <= 6 * 12
        assert row["cached_share"] == 0
        assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p99"]
        assert row["goodput_share"] == 1
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"latency.png", "ttft.png"}


def test_a_trace_one_by_one_and_at_two_speeds(server: TritonServer, tmp_path: Path) -> None:
    """Blocks that the trace shares come from the prefix cache, which is cold for each run."""
    figures = tmp_path / "figures.json"
    bench(
        *("--url", f"127.0.0.1:{server.grpc_port}", "--json", str(figures)),
        *("--trace", str(CONVERSATIONS), "--block-size", "32", "--requests", "8"),
        *("--concurrency", "1", "--time-scale", "0.1,0.02"),
    )
    one_by_one, sparse, dense = rows_of(figures)
    assert (sparse["level"], dense["level"]) == (0.1, 0.02)
    assert sparse["seconds"] > 0.1 * 19  # the eighth request comes at 19.5 s of the trace
    assert one_by_one["cached_share"] > 0.3
    for row in (sparse, dense):
        assert row["requests"] == 8 and not row["errors"]
        # requests that come at the same time each compute the same prefix
        assert row["cached_share"] <= one_by_one["cached_share"]
        assert row["output_tokens"] == one_by_one["output_tokens"]


def test_a_second_command_finds_the_prefix_cache_cold_unless_it_shares_a_salt(
    server: TritonServer, tmp_path: Path
) -> None:
    figures = tmp_path / "figures.json"
    common = ["--input-len", "100", "--requests", "2", "--concurrency", "1", "--output-len", "4"]
    common += ["--json", str(figures)]

    def cached_share(*more: str) -> float:
        bench(*common, *more)
        return float(rows_of(figures)[0]["cached_share"])

    triton = ("--url", f"127.0.0.1:{server.grpc_port}")
    salt, other = uuid.uuid4().hex, uuid.uuid4().hex
    assert [cached_share(*triton), cached_share(*triton)] == [0, 0]
    assert cached_share(*triton, "--cache-salt", salt) == 0
    assert cached_share(*triton, "--cache-salt", salt) > 0.5
    with gateway_of(f"127.0.0.1:{server.grpc_port}", tmp_path / "log") as gateway:
        openai = ("--url", gateway.url, "--protocol", "openai")
        cached_share(*openai)
        assert cached_share(*openai) > 0.5
        assert cached_share(*openai, "--cache-salt", other) == 0


@pytest.mark.parametrize("protocol", ["grpc", "http", "openai"])
def test_prompts_of_a_file_over_each_protocol(
    server: TritonServer, protocol: str, tmp_path: Path
) -> None:
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text("\n".join(map(json.dumps, PROMPTS)))
    common = ["--prompts", str(prompts), "--output-len", "8", "--concurrency", "2"]
    common += ["--warm-up", "1", "--json", str(figures)]
    if protocol == "openai":
        with gateway_of(f"127.0.0.1:{server.grpc_port}", tmp_path / "log") as gateway:
            address = gateway.url.removeprefix("http://")
            bench("--url", address, "--protocol", "openai", *common)
            result = CliRunner().invoke(main, ["bench", "serve", "--url", gateway.url, *common])
            assert "INVALID_ARG: no Triton HTTP server answers there: HTTP" in result.output
    else:
        url = server.url() if protocol == "http" else f"127.0.0.1:{server.grpc_port}"
        bench("--url", url, *common)
    (row,) = rows_of(figures)
    assert row["requests"] == 3 and row["errors"] == {}
    assert row["output_tokens"] == 8 + 6 + 8
    assert row["input_tokens"] > 3 + len("France")
    assert 0 <= row["tpot_ms"]["p50"] <= row["e2e_ms"]["p99"]


def test_errors_are_counted_by_code(server: TritonServer, tmp_path: Path) -> None:
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    lines = [{"input_ids": [5]}, {"input_ids": [99_999]}, {"prompt": "a", "max_tokens": 10**9}]
    lines.append({"prompt": "\ud800"})  # which the client itself refuses
    prompts.write_text("\n".join(map(json.dumps, lines)))
    output = bench(
        *("--url", f"127.0.0.1:{server.grpc_port}", "--json", str(figures)),
        *("--prompts", str(prompts), "--concurrency", "1"),
    )
    assert "errors INVALID_ARG" in output
    assert "INVALID_ARG: input_ids" in output
    (row,) = rows_of(figures)
    assert row["requests"] == 4 and row["errors"] == {"INVALID_ARG": 3}
    assert row["e2e_ms"]["p50"] > 0


def test_a_run_without_any_answer_says_why_and_fails(server: TritonServer) -> None:
    command = ["bench", "serve", "--url", f"127.0.0.1:{server.grpc_port}", "--requests", "2"]
    result = CliRunner().invoke(main, [*command, "--input-len", "9000", "--concurrency", "1,2"])
    assert result.exit_code == 1
    assert "INVALID_ARG: prompt of 9000 tokens does not fit" in result.output
    assert "Error: no request was answered at concurrency 1, concurrency 2" in result.output


def test_a_server_that_is_not_there() -> None:
    result = CliRunner().invoke(main, ["bench", "serve", "--url", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "Error: the server answers no request: CONNECTION_FAILED" in result.output


def test_an_interrupted_run_reports_the_requests_that_have_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    num_asked = 0

    async def stream(target: object, call: Call) -> AsyncGenerator[Chunk, None]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 4:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        yield Chunk(True, 1)

    file = tmp_path / "figures.json"

    @contextmanager
    def own_server(_: object) -> Iterator[str]:
        yield "127.0.0.1:1"
        assert file.exists()  # the process may be ended before the server has stopped

    monkeypatch.setattr(TritonTarget, "stream", stream)
    monkeypatch.setattr(serve_command, "address_of", own_server)
    command = ["bench", "serve", "--concurrency", "1", "--warm-up", "0"]
    result = CliRunner().invoke(main, [*command, "--json", str(file)])
    assert result.exit_code == 130, result.output
    written = json.loads(file.read_text("utf-8"))
    assert written["title"] == "serve, interrupted"
    assert [(row["requests"], row["output_tokens"]) for row in written["rows"]] == [(3, 3)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_its_own_server_and_the_end_by_ctrl_c_and_other_signals(number: signal.Signals) -> None:
    """What has been measured is reported; the server and its files are gone."""
    command = [sys.executable, "-c", "from minisgl_backend.cli.main import main; main()"]
    command += ["bench", "serve", "--requests", "8", "--output-len", "4"]
    command += ["--concurrency", "8", "--rate", "0.01"]
    # sockets are in the folder, and a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        terminal, its_end = pty.openpty()
        # not with pexpect's own fork, which upsets gRPC threads of other tests
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": folder, "TERM": "xterm", "COLUMNS": "200"},
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
        )
        os.close(its_end)
        # longer than it takes to see that a start hangs, and to start again
        shown = fdspawn(terminal, timeout=300, encoding="utf-8")
        shown.logfile_read = sys.stdout  # pytest shows it if the test fails
        try:
            shown.expect(r"rate 0\.01")
            assert list(Path(folder).glob("minisgl-*"))
            servers = children_of(process.pid)
            assert servers
            process.send_signal(number)
            shown.expect("time to first token, ms, p50")
            shown.expect("interrupted")
            shown.expect(pexpect.EOF)
            assert process.wait() == 128 + number
            assert not [pid for pid in servers if Path(f"/proc/{pid}").exists()]
        finally:
            process.kill()
            process.wait()
            shown.close()
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--protocol", "openai"], "--protocol openai needs --url"),
        (["--protocol", "http"], "--protocol http needs --url"),
        (["--concurrency", "0"], "has a number that is not above 0"),
        (["--rate", "fast"], "is no list of numbers"),
        (["--url", "http://a:1", "--protocol", "grpc"], "http://a:1 is not an address for grpc"),
        (["--time-scale", "2"], "--time-scale needs --trace"),
        (["--slo", "speed=3"], "an objective is ttft, tpot or e2e"),
        (["--json", "/nowhere/figures.json"], "/nowhere/figures.json cannot be written"),
        (["--json", ""], ". cannot be written"),
        (["--json", "/proc/figures.json"], "/proc/figures.json cannot be written"),
        (["--json", f"/tmp/{'x' * 256}"], "x cannot be written"),
        (["--plots", "/proc/plots"], "--plots /proc/plots: "),
        (["--plots", "/proc"], "--plots /proc: "),
    ],
)
def test_wrong_options(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["bench", "serve", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output


def test_missing_plots_are_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["bench", "serve", "--plots", "somewhere"])
    assert result.exit_code == 2
    assert "--plots needs matplotlib" in result.output


def test_a_key_that_is_not_ascii_is_sent_in_utf_8() -> None:
    heads = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def ask() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            target = OpenAITarget(
                f"127.0.0.1:{port}", model="demo", api_key="clé", sampling=Sampling()
            )
            with pytest.raises(Refused, match="HTTP 401"):
                await anext(target.stream(Call(1, text="Hi")))
            await target.close()

    asyncio.run(ask())
    assert "Authorization: Bearer clé" in heads[0].decode()


def test_events_of_other_openai_servers() -> None:
    """Usage may come with null choices; thoughts and errors come under several names."""
    text = {"choices": [{"text": "Hi"}], "usage": None}
    assert chunk_of_event(json.dumps(text)) == Chunk(True)
    role = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
    assert chunk_of_event(json.dumps(role)) == Chunk(False)
    usage = {
        "choices": [],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert chunk_of_event(json.dumps(usage)) == Chunk(False, 7, 5, 2)
    with pytest.raises(Refused, match="overloaded: later"):
        chunk_of_event('{"error": {"code": null, "type": "overloaded", "message": "later"}}')
    with pytest.raises(Refused, match="error: out of memory"):
        chunk_of_event('{"error": "out of memory"}')
    with pytest.raises(Refused, match="not JSON: <html>"):
        chunk_of_event("<html>")
    with pytest.raises(Refused, match="not an event: 5"):
        chunk_of_event("5")
    for name in ("reasoning_content", "reasoning"):
        thought = {"choices": [{"delta": {"content": None, name: "Hm"}}]}
        assert chunk_of_event(json.dumps(thought)) == Chunk(True)
    nothing = {"choices": [{"delta": None}], "error": None}
    assert chunk_of_event(json.dumps(nothing)) == Chunk(False)
    assert chunk_of_event('{"choices": null}') == Chunk(False)
