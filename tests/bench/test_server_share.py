"""The engine behind tritonserver compared with the engine alone, with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.errors import EngineFailure
from minisgl_backend.server.process import TritonServer
from minisgl_bench import server_share
from minisgl_bench.clients import ask_at_once, requests_of
from minisgl_bench.prompts import Prompt, RandomRequests

pytestmark = pytest.mark.server


def test_the_share_is_that_of_the_same_requests(
    server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def shared(*args: Any, **kwargs: Any) -> Iterator[TritonServer]:
        yield server

    monkeypatch.setattr(server_share, "started", shared)
    file = tmp_path / "figures.json"
    command = ["bench", "server-share", "--requests", "5", "--output-length", "4", "9"]
    command += ["--clients", "2", "--num-pages", "256", "--max-sequence-length", "256"]
    result = CliRunner().invoke(main, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert figures["requests"] == 5
    assert 5 * 4 <= figures["output_tokens"] <= 5 * 9
    assert figures["ttft_p50_ms"] <= figures["seconds"] * 1e3
    assert figures["share"] == figures["tokens_per_s"] / figures["offline_tokens_per_s"]
    # if the engine's own figures are given, it is not measured
    alone = tmp_path / "alone.json"
    prompts = RandomRequests(
        requests=5, input_length=(16, 64), output_length=(4, 9), temperature=0.0, prompt_seed=0
    ).prompts(2048)
    content = {
        "requests": 5,
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "output_tokens": figures["output_tokens"],
        "tokens_per_s": 1000.0,
        "info": {},
    }
    alone.write_text(json.dumps(content), encoding="utf-8")
    command += ["--alone", str(alone)]
    result = CliRunner().invoke(main, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert figures["offline_tokens_per_s"] == 1000.0
    for name in ("requests", "prompt_tokens", "output_tokens"):
        alone.write_text(json.dumps({**content, name: 6}), encoding="utf-8")
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 2 and "--alone is of other requests" in result.output


@pytest.mark.parametrize("content", ["figures", "[]", '{"requests": 16, "tokens_per_s": 9.5}'])
def test_a_file_of_something_else_is_refused_before_a_server_is_started(
    content: str, tmp_path: Path
) -> None:
    alone = tmp_path / "alone.json"
    alone.write_text(content, encoding="utf-8")
    result = CliRunner().invoke(main, ["bench", "server-share", "--alone", str(alone)])
    assert result.exit_code == 2
    assert f"--alone {alone} is not of `bench offline`: " in result.output


def test_a_refused_request_ends_the_run(server: TritonServer) -> None:
    prompt = Prompt(np.array([1], np.int32), 10**6)
    requests = requests_of([prompt], model="minisgl", temperature=0.0)
    with pytest.raises(EngineFailure, match="max_tokens"):
        ask_at_once(f"127.0.0.1:{server.grpc_port}", requests, num_processes=2)
