"""perf_analyzer, the load generator that Triton users know, drives the ensembles with streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl_backend.server.process import TritonServer
from minisgl_bench.perf_analyzer_binary import find_perf_analyzer


@pytest.mark.parametrize("model", ["minisgl", "llm_engine"])
def test_streaming(
    paced_server: TritonServer, perf_analyzer_wheel: Path, model: str, tmp_path: Path
) -> None:
    perf_analyzer = find_perf_analyzer(tmp_path, binary=None, wheel=perf_analyzer_wheel)
    data = {"input_ids": {"content": [1, 2, 3], "shape": [3]}}
    inputs = tmp_path / "input.json"
    inputs.write_text(
        json.dumps({"data": [{**data, "stream": [True], "max_tokens": [8], "ignore_eos": [True]}]})
    )
    export = tmp_path / "export.json"
    arguments = ["-m", model, "--service-kind", "triton", "-i", "grpc", "--streaming"]
    arguments += ["-u", f"127.0.0.1:{paced_server.grpc_port}", "--async"]
    arguments += ["--concurrency-range", "2", "--request-count", "20"]
    arguments += ["--input-data", str(inputs)]
    arguments += ["--profile-export-file", str(export)]
    done = perf_analyzer.run(arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    assert len(requests) >= 20
    # one response per chunk, of one or more tokens, and none that is empty
    assert all(1 <= len(request["response_timestamps"]) <= 9 for request in requests)
