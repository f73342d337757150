"""`minisgl serve`, as an operator runs it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.config import DEMO_MODEL
from minisgl_check.processes import runs
from tests.server.client import wait_for

PORTS = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "health")]


@contextmanager
def serve(*arguments: str, folder: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, with all its output on stdout; its files go to ``folder``."""
    place = {} if folder is None else {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-m", "minisgl_backend.cli", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **place},
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        yield Path(name)


def lines_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The output up to the line that contains ``text``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"ended without {text!r}:\n" + "".join(lines))


def test_serve_answers_and_stops(folder: Path) -> None:
    """It says when it is ready, its curl line works, and Ctrl-C ends it and leaves nothing."""
    with serve(*PORTS, "--max-running-requests", "7", folder=folder) as process:
        text = "".join(lines_until(process, '"max_tokens"'))
        assert "ready after" in text
        command = text[text.index("curl") :]
        output = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        assert json.loads(output)["text_output"].strip().startswith("Paris")
        (directory,) = folder.glob("minisgl-*")
        assert directory.stat().st_mode & 0o777 == 0o700
        config = (directory / "model_repository" / "llm_engine" / "config.pbtxt").read_text()
        assert "max_running_requests" in config and '"7"' in config
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    assert not list(folder.iterdir())


def test_signals_end_it(folder: Path) -> None:
    """So does the end of its terminal; before it is ready as well as after."""
    with serve(*PORTS, folder=folder) as process:
        lines_until(process, "ready after")
        process.send_signal(signal.SIGHUP)
        assert process.wait(timeout=120) == 0
    assert not list(folder.iterdir())
    with serve(*PORTS, "--log-verbose", "1", folder=folder) as process:
        lines_until(process, "TRITONBACKEND_ModelInstanceInitialize: ")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert not list(folder.iterdir())


def test_it_starts_again_what_was_killed(folder: Path) -> None:
    """The health port reports it, the ports stay the same, and a stop is a stop."""
    with serve(*PORTS, folder=folder) as process:
        text = "".join(lines_until(process, "health"))
        (health,) = re.findall(r"health +(http://\S+)/ready", text)
        (triton,) = re.findall(r"HTTP +(http://\S+)", text)
        wait_for(lambda: get(health + "/ready")["ready"], "a ready server")
        stats = get(health + "/stats")
        os.kill(stats["tritonserver"]["pid"], signal.SIGKILL)
        told: dict[str, Any] = {}

        def is_not_ready() -> bool:
            told.update(get(health + "/ready"))
            return not told["ready"]

        wait_for(is_not_ready, "an honest answer")
        assert "tritonserver ended with code -9" in told["reasons"]
        wait_for(lambda: get(health + "/ready")["ready"], "a ready server")
        body = json.dumps(
            {"text_input": "The capital of France is", "max_tokens": 3, "temperature": 0}
        ).encode()
        answer = get(urllib.request.Request(f"{triton}/v2/models/minisgl/generate", data=body))
        assert answer["text_output"]
        assert len(stats["models"]) == 3
        assert not any(runs(model["pid"]) for model in stats["models"])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert not list(folder.iterdir())


def test_a_kill_ends_all_of_it_at_once(folder: Path) -> None:
    """Requests in flight are not waited for: the ports are free for the next server, which removes
    what is left behind."""
    with serve(*PORTS, "--drain-timeout-s", "600", folder=folder) as process:
        text = "".join(lines_until(process, "health"))
        (health,) = re.findall(r"health +(http://\S+)/ready", text)
        (port,) = re.findall(r"HTTP +http://\S+:(\d+)", text)
        wait_for(lambda: get(health + "/ready")["ready"], "a ready server")
        stats = get(health + "/stats")
        pids = [stats["tritonserver"]["pid"], *(model["pid"] for model in stats["models"])]
        body = {"text_input": "x", "stream": True, "ignore_eos": True, "max_tokens": 8000}
        url = f"http://127.0.0.1:{port}/v2/models/minisgl/generate_stream"
        request = urllib.request.Request(url, data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as stream:
            assert stream.readline()
            process.kill()
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                stream.read()
        wait_for(lambda: not any(map(runs, pids)), "the end of its processes")
    assert list(folder.iterdir())
    with serve(f"--http-port={port}", *PORTS[1:], folder=folder) as process:
        lines_until(process, "ready after")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert not list(folder.iterdir())


def get(url: str | urllib.request.Request) -> dict[str, Any]:
    """The JSON at an address, whatever the status."""
    try:
        with urllib.request.urlopen(url, timeout=120) as response:
            body: dict[str, Any] = json.load(response)
    except urllib.error.HTTPError as error:
        body = json.load(error)
    return body


def failure_of(*arguments: str) -> str:
    with serve(*PORTS, *arguments) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        assert process.wait(timeout=120) != 0
    assert "Traceback" not in output
    return output


def test_the_true_cause_of_a_failed_load(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for file in Path(DEMO_MODEL).iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    output = failure_of("--model", str(broken))
    assert output.endswith("Error: llm_engine: the checkpoint lacks lm_head.weight\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "other machines can reach --host 0.0.0.0"),
        (["--host", "192.0.2.1", "--allow-remote"], "--health-port 0 on 192.0.2.1 cannot be used"),
        (["--model", "/nowhere/at/all"], "neither a folder nor a model id"),
        (["--max-prefill-tokens", "many"], "max_prefill_tokens must be an integer"),
        (["--tritonserver", "/nowhere"], "there is no tritonserver at"),
        (["--device", "cpu", "--attention-backend", "fa"], "attention_backend=fa needs a GPU"),
        (["--device", "cpu", "--num-pages", "9999999999"], "num_pages=9999999999 of 16 positions"),
        (
            ["--tokenizer", str(Path(__file__).parent)],
            "one, and the option tokenizer names a folder",
        ),
        (["--enable-lora", "true", "--lora-module", "a=/nowhere"], "folder /nowhere does not"),
        (["--http-port", "9", "--grpc-port", "9"], "--grpc-port 9 is that of another endpoint"),
        (["--health-port", "9", "--grpc-port", "9"], "--health-port 9 is that of another endpoint"),
    ],
)
def test_what_cannot_start_is_refused_before_anything_does(
    arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    result = CliRunner().invoke(main, ["serve", *PORTS, *arguments])
    assert result.exit_code == 2
    (line,) = result.output.splitlines()
    assert line.startswith("Error: ") and message in line
    assert not list(folder.iterdir())
