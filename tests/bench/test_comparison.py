"""Two configurations in one run, and the marks around phases."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.build import build_engine
from minisgl_backend.cli.main import main
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.request import SamplingParams
from minisgl_bench.comparison import changed
from minisgl_bench.profiling import marked
from minisgl_bench.prompts import random_prompts
from minisgl_bench.runs import run_engine

SMALL = ["--device", "cpu", "--num-pages", "64", "--max-sequence-length", "128"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("page_size=64", {"page_size": 64}),
        ("attention_backend=fa,triton", {"attention_backend": "fa,triton"}),
        (
            "attention_backend=fa,triton,overlap=false,page_size=auto",
            {"attention_backend": "fa,triton", "overlap": False, "page_size": 16},
        ),
    ],
)
def test_changes_are_names_and_values(text: str, values: dict[str, object]) -> None:
    options = changed(EngineOptions(page_size=32, num_pages=9), text)
    assert {name: getattr(options, name) for name in values} == values
    assert options.num_pages == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [("fast", "takes name=value"), ("pagesize=1", "did you mean"), ("page_size=x", "an integer")],
)
def test_an_invalid_change_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(EngineOptions(), text)


def test_the_second_configuration_stands_beside_the_first(tmp_path: Path) -> None:
    command = ["bench", "offline", "--requests", "2", "--output-length", "2", "4", *SMALL]
    file, trace = tmp_path / "figures.json", tmp_path / "trace.json"
    command += ["--compare", "page_size=32,overlap=false", "--profile", str(trace)]
    result = CliRunner().invoke(main, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert (figures["info"]["page_size"], figures["compared"]["info"]["page_size"]) == (16, 32)
    for report in (figures, figures["compared"]):
        (row,) = report["rows"]
        assert row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert row["tpot_p50_ms"] > 0
    assert figures["output_tokens"] == figures["compared"]["output_tokens"]
    assert "ratio" in result.output
    for path in (trace, tmp_path / "trace-compared.json"):
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        assert "aten::linear" in {event["name"] for event in events}  # on the engine's own thread


def test_other_processes_are_not_traced(tmp_path: Path) -> None:
    trace = ["--profile", str(tmp_path / "trace.json")]
    command = ["bench", "offline", "--data-parallel-size", "2", *trace, *SMALL]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "Error: option data_parallel_size: this looks into one engine" in result.output


def test_marks_name_the_phases_layers_and_sampling_of_each_step() -> None:
    """A worker thread marks layers and sampling, so only the order within each thread is fixed."""
    marks: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        marks.append(name)
        yield

    options = EngineOptions(device="cpu", num_pages=64, max_sequence_length=128, overlap=False)
    engine = build_engine(options, marked(mark))
    prompts = random_prompts(
        1, input_length=(20, 20), output_length=(2, 2), vocab_size=engine.info.vocab_size, seed=0
    )
    try:
        run_engine(engine, prompts, SamplingParams(temperature=0))
    finally:
        engine.close(drain_s=0)
    in_step = [*(f"layer {index}" for index in range(load_spec(Path(DEMO_MODEL)).num_layers))]
    in_step += ["logits", "sampling"]
    of_loop = [name for name in marks if name not in in_step]
    expected: list[str] = []
    for step in ("prefill 20", "decode 1"):
        expected += ["plan", f"launch {step}", f"wait {step}", f"commit {step}"]
    assert of_loop[: len(expected)] == expected
    assert [name for name in marks if name in in_step] == in_step * 2
