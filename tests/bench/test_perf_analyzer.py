"""`minisgl bench perf-analyzer` with the real binary: how it is run and how its export is read."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.process import TritonServer
from minisgl_bench.perf_analyzer import (
    MODELS,
    Level,
    Style,
    flags,
    input_data,
    outcomes_of,
    random_texts,
)
from minisgl_bench.perf_analyzer_binary import PerfAnalyzer, find_perf_analyzer
from minisgl_kit.calls import Call


@pytest.mark.server
@pytest.mark.parametrize("style", list(MODELS))
def test_each_style_is_measured(
    server: TritonServer, perf_analyzer_wheel: Path, style: str, tmp_path: Path
) -> None:
    """The recipes of docs/benchmarks.md, run on a small scale."""
    figures = tmp_path / "figures.json"
    command = ["bench", "perf-analyzer", "--style", style, "--concurrency", "2", "--rate", "5"]
    command += ["--url", f"127.0.0.1:{server.grpc_port}", "--wheel", str(perf_analyzer_wheel)]
    command += ["--requests", "6", "--output-len", "8", "--request-parameter", "top_k:5:int"]
    command += ["--slo", "ttft=60000", "--export", str(tmp_path), "--json", str(figures)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert "time to first token, ms, p50" in result.output
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["load"], row["level"]) for row in rows] == [("concurrency", 2), ("rate", 5)]
    for row in rows:
        assert row["requests"] >= 6 and not row["errors"]
        assert row["output_tokens"] == 8 * row["requests"]
        assert row["input_tokens"] > 6
        assert 0 < row["ttft_ms"]["p50"] <= row["e2e_ms"]["p99"]
        assert row["goodput_share"] == 1
    export = json.loads((tmp_path / f"{style}-concurrency-2.json").read_text())
    sent = export["experiments"][0]["requests"][0]["request_inputs"]
    assert ("sampling_parameters" in sent) == (style == "vllm")


@pytest.mark.server
def test_what_perf_analyzer_says_is_told(server: TritonServer, perf_analyzer_wheel: Path) -> None:
    command = ["bench", "perf-analyzer", "--wheel", str(perf_analyzer_wheel), "--warm-up", "0"]
    command += ["--url", f"127.0.0.1:{server.grpc_port}", "--request-parameter", "nonsense"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "perf_analyzer failed: Error: Failed to parse --request-parameter" in result.output
    assert "SYNOPSIS" not in result.output


def test_the_binary_out_of_a_wheel(perf_analyzer_wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    tool = find_perf_analyzer(folder, binary=None, wheel=perf_analyzer_wheel)
    assert tool.path == folder / "perf_analyzer"
    assert "2.51" in tool.run(["--version"]).stderr
    named = find_perf_analyzer(tmp_path, binary=str(tool.path), wheel=None)
    assert "2.51" in named.run(["--version"]).stderr
    wheel = tmp_path / "tritonclient.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tritonclient/__init__.py", "")
    with pytest.raises(ConfigError, match=r"tritonclient\.whl holds no perf_analyzer"):
        find_perf_analyzer(folder, binary=None, wheel=wheel)
    wheel.write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"tritonclient\.whl is no wheel: "):
        find_perf_analyzer(folder, binary=None, wheel=wheel)


def test_a_binary_that_is_not_there_or_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no /nowhere found: put perf_analyzer on PATH"):
        find_perf_analyzer(tmp_path, binary="/nowhere", wheel=None)
    broken = tmp_path / "perf_analyzer"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="perf_analyzer does not run here: broken"):
        find_perf_analyzer(tmp_path, binary=str(broken), wheel=None)
    broken.write_bytes(b"\x7fELF of another machine")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match="perf_analyzer does not run here: Exec format error"):
        find_perf_analyzer(folder, binary=str(broken), wheel=None)


@pytest.mark.parametrize("folder", ["/proc/exports", "/proc"])
def test_a_folder_that_takes_no_files_is_told_before_anything_is_measured(folder: str) -> None:
    result = CliRunner().invoke(main, ["bench", "perf-analyzer", "--export", folder])
    assert result.exit_code == 2
    assert f"Error: --export {folder}: " in result.output


def test_what_lies_in_memory_does_not_end_its_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    tunables = PerfAnalyzer(Path("perf_analyzer")).environment["GLIBC_TUNABLES"].split(":")
    assert tunables == [
        "glibc.malloc.arena_max=2",
        "glibc.malloc.tcache_count=0",
        "glibc.malloc.mxfast=0",
    ]


@pytest.mark.parametrize(
    ("export", "complaint"),
    [
        ('{"experiments": [', "export is not whole: JSONDecodeError: "),
        ('{"experiments": []}', "export is not whole: IndexError: "),
        ('{"experiments": [{"requests": []}]}', "export has no requests"),
    ],
)
def test_an_export_that_lacks_something_is_told(
    export: str, complaint: str, tmp_path: Path
) -> None:
    short = tmp_path / "perf_analyzer"
    write = f"""for last; do :; done; echo '{export}' > "$last"\n"""
    short.write_text(f"#!/bin/sh\n[ $# = 1 ] && exit\n{write}")
    short.chmod(0o755)
    command = ["bench", "perf-analyzer", "--binary", str(short), "--url", "127.0.0.1:1"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert f"Error: perf_analyzer's {complaint}" in result.output


def test_a_tool_that_writes_no_export_is_told(tmp_path: Path) -> None:
    silent = tmp_path / "perf_analyzer"
    silent.write_text("#!/bin/sh\n[ $# = 1 ] || echo no measurement\n")
    silent.chmod(0o755)
    command = ["bench", "perf-analyzer", "--binary", str(silent), "--url", "127.0.0.1:1"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "perf_analyzer failed: no measurement" in result.output


def test_the_last_that_a_failing_perf_analyzer_says_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "perf_analyzer"
    said = "echo settings; (seq --format 'line %g' 20; echo reason; echo; echo Usage: long) >&2"
    broken.write_text(f"#!/bin/sh\n[ $# = 1 ] && exit\n{said}\nexit 99\n")
    broken.chmod(0o755)
    command = ["bench", "perf-analyzer", "--binary", str(broken), "--url", "127.0.0.1:1"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1
    assert "perf_analyzer failed: line 14" in result.output
    assert result.output.endswith("line 20\nreason\n")


def test_a_wrong_objective_is_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["bench", "perf-analyzer", "--slo", "speed=3"])
    assert result.exit_code == 2
    assert "an objective is ttft, tpot or e2e" in result.output


def test_flags() -> None:
    said = " ".join(flags("tensorrtllm", ["top_p:0.9:double"]))
    assert "-m minisgl_batched" in said and "-i grpc --streaming --async" in said
    assert "--request-parameter top_p:0.9:double" in said
    assert Level("concurrency", 4).arguments == ["--concurrency-range", "4"]
    rate = ["--request-rate-range", "0.5", "--request-distribution", "poisson"]
    assert Level("rate", 0.5).arguments == rate


@pytest.mark.parametrize("style", list(MODELS))
def test_inputs_are_texts(style: Style) -> None:
    (entry,) = input_data(style, [Call(7, text="Hi")])["data"]
    assert entry["text_input"] == ["Hi"] and entry["stream"] == [True]
    with pytest.raises(ConfigError, match="needs `prompt`"):
        input_data(style, [Call(7, input_ids=[1])])


def test_random_texts_depend_on_the_seed_alone() -> None:
    texts = [call.text for call in random_texts(3, 5, 8, "a")]
    assert texts == [call.text for call in random_texts(3, 5, 8, "a")]
    assert texts != [call.text for call in random_texts(3, 5, 8, "b")]
    assert all(text is not None and len(text.split()) == 5 for text in texts)


def test_an_export_is_read() -> None:
    """A chunk of two tokens, one of one token, and the last response, which is empty."""
    counts = {"num_input_tokens": 9, "num_cached_tokens": 4}
    responses = [{"num_output_tokens": 2, **counts}, {"num_output_tokens": 1, **counts}, {}]
    request = {
        "timestamp": 1_000_000_000,
        "response_timestamps": [1_100_000_000, 1_300_000_000, 1_400_000_000],
        "response_outputs": responses,
    }
    silent = {"timestamp": 0, "response_timestamps": [], "response_outputs": []}
    export = {"experiments": [{"requests": [request, silent]}]}
    answered, failed = outcomes_of(export)
    assert answered.ttft_ms == pytest.approx(100)
    assert answered.tpot_ms == pytest.approx(100)
    assert answered.e2e_ms == pytest.approx(400)
    assert (answered.num_output_tokens, answered.num_input_tokens) == (3, 9)
    assert answered.num_cached_tokens == 4
    assert failed.error == "no response"


GENAI_PERF: dict[str, tuple[list[str], dict[str, list[str] | list[int]]]] = {
    "minisgl": (
        [],
        {"sampling_parameters": ['{"max_tokens":"8","min_tokens":"8"}']},
    ),
    "minisgl_batched": (
        ["--shape", "max_tokens:1", "--shape", "text_input:1"],
        {"max_tokens": [8], "min_length": [8]},
    ),
}


@pytest.mark.server
@pytest.mark.parametrize("model", list(GENAI_PERF))
def test_what_genai_perf_makes_perf_analyzer_do(
    server: TritonServer, perf_analyzer_wheel: Path, model: str, tmp_path: Path
) -> None:
    """The flags and inputs that genai-perf 0.0.16 writes for the recipe of docs/benchmarks.md, with
    endpoint type kserve and the backends vllm and tensorrtllm."""
    more, inputs = GENAI_PERF[model]
    common = {"model": model, "exclude_input_in_output": [True], "stream": [True]}
    data = [{**common, "text_input": [f" not in danger of kibes {n}"], **inputs} for n in range(4)]
    file, export = tmp_path / "inputs.json", tmp_path / "profile_export.json"
    file.write_text(json.dumps({"data": data}))
    tool = find_perf_analyzer(tmp_path, binary=None, wheel=perf_analyzer_wheel)
    command = ["-m", model, "--async", "--stability-percentage", "999", "--request-count", "4"]
    command += ["-i", "grpc", "--streaming", *more, "-u", f"127.0.0.1:{server.grpc_port}"]
    command += ["--concurrency-range", "2", "--service-kind", "triton", "--input-data", str(file)]
    done = tool.run([*command, "--profile-export-file", str(export)])
    assert done.returncode == 0, done.stdout + done.stderr
    requests = json.loads(export.read_text())["experiments"][0]["requests"]
    assert len(requests) >= 4
    for request in requests:
        assert "".join(response.get("text_output", "") for response in request["response_outputs"])
