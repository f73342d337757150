"""The benchmarks of an engine, run on a small scale with the demo model."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from minisgl_backend.build import build_engine
from minisgl_backend.cli.main import main
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_bench import engines
from minisgl_bench.prompts import random_prompts
from tests.figures import figures_of
from tests.unit.tritonserver.test_engine_metrics import INFO

SMALL = ["--device", "cpu", "--num-pages", "256", "--max-sequence-length", "256"]


def test_prompts_are_those_that_others_publish_figures_for() -> None:
    prompts = random_prompts(
        256, input_length=(100, 1024), output_length=(100, 1024), vocab_size=151_936, seed=0
    )
    assert sum(len(prompt.tokens) for prompt in prompts) == 142_827
    assert sum(prompt.num_output_tokens for prompt in prompts) == 133_966


@pytest.mark.parametrize(
    ("command", "names"),
    [
        (["decode", "--batch-size", "2", "--context", "20", "--steps", "5"], {"batch", "step_ms"}),
        (["prefill", "--length", "20", "--repeats", "2"], {"batch", "prompt_tokens", "median_ms"}),
        (["offline", "--requests", "2", "--output-length", "4", "8"], {"tokens_per_s"}),
        (
            "prefixes --groups 2 --each 2 --shared 40 --own 4 --output-length 4".split(),
            {"tokens_per_s", "cached_share"},
        ),
        (
            "conversations --conversations 2 --turns 2 --said 40 --answered 4".split(),
            {"ttft_p50_ms", "last_turn_p50_ms", "cached_share"},
        ),
    ],
)
def test_commands_report_what_they_measured(
    command: list[str], names: set[str], tmp_path: Path
) -> None:
    figures = figures_of([*command, *SMALL], tmp_path)
    assert len(figures["rows"]) == 1
    assert names <= figures["rows"][0].keys()
    assert figures["info"]["attention"] == "sdpa"
    assert figures["info"]["minisgl"] == version("minisgl-triton")


@pytest.mark.parametrize("eager", [True, False])
def test_decode_steps_without_graphs_are_measured_if_asked_for(eager: bool, tmp_path: Path) -> None:
    command = ["decode", "--batch-size", "1", "--batch-size", "2", "--context", "20"]
    command += ["--steps", "3", *SMALL, *["--eager"] * eager]
    rows = figures_of(command, tmp_path)["rows"]
    assert [row["batch"] for row in rows] == [1, 2]
    for row in rows:
        assert row["eager_ms"] > 0 if eager else row["eager_ms"] == "-"


def test_fewer_adapters_than_slots_are_measured(tmp_path: Path) -> None:
    command = ["adapters", "--names", "2", "--batch-size", "2", "--context", "4", "--steps", "2"]
    figures = figures_of([*command, *SMALL], tmp_path)
    assert [row["adapters"] for row in figures["rows"]] == ["none", "one", "all"]
    arrivals = figures["beside"][0]
    assert arrivals["in_slot_ms"] > 0
    assert arrivals["in_memory_ms"] == arrivals["longest_ms"] == "-"  # all are in a slot


def test_adapters_that_are_timed_in_main_memory_were_in_no_slot(tmp_path: Path) -> None:
    command = ["adapters", "--names", "3", "--max-loras", "2", "--batch-size", "2"]
    figures = figures_of([*command, "--context", "4", "--steps", "2", *SMALL], tmp_path)
    arrivals = figures["beside"][0]
    assert 0 < arrivals["in_memory_ms"] == arrivals["longest_ms"]  # of the third, once


@pytest.mark.parametrize(
    ("ranks", "nodes", "replicas", "gpus", "nccl"),
    [(1, 1, 1, None, None), (2, 1, 1, 2, "2.28.9"), (1, 1, 2, 2, None), (8, 2, 1, 4, "2.28.9")],
)
def test_a_host_s_gpus_and_versions_of_their_libraries(
    ranks: int,
    nodes: int,
    replicas: int,
    gpus: int | None,
    nccl: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that is not installed is left out."""
    versions = {"minisgl-triton": "0.1.0", "cuda-bindings": "13.5.0"}

    def lookup(distribution: str) -> str:
        if distribution not in versions:
            raise PackageNotFoundError(distribution)
        return versions[distribution]

    def no_management_library(index: int) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr("importlib.metadata.version", lookup)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_memory_used", no_management_library, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    options = EngineOptions(tensor_parallel_size=ranks, nnodes=nodes, data_parallel_size=replicas)
    found = engines.engine_facts(replace(INFO, device="cuda:0"), options)
    assert (found["minisgl"], found["cuda_bindings"]) == ("0.1.0", "13.5.0")
    assert "flashinfer" not in found
    assert found.get("nccl") == nccl
    assert found.get("gpus") == (None if gpus is None else ", ".join(["NVIDIA H200"] * gpus))


def test_prompts_begin_with_what_the_prefix_cache_knows(tmp_path: Path) -> None:
    command = ["prefill", "--length", "40", "--shared-tokens", "32", "--repeats", "2"]
    (row,) = figures_of([*command, *SMALL], tmp_path)["rows"]
    assert (row["batch"], row["prompt_tokens"], row["cached_tokens"]) == (1, 40, 32)
    result = CliRunner().invoke(main, ["bench", *command[:-4], "--shared-tokens", "40", *SMALL])
    assert result.exit_code == 2
    assert "--shared-tokens must be less" in result.output


def test_prompts_are_measured_with_and_without_logprobs(tmp_path: Path) -> None:
    command = ["prefill", "--length", "40", "--repeats", "2", "--prompt-logprobs", "1"]
    (row,) = figures_of([*command, *SMALL], tmp_path)["rows"]
    assert row["times_as_long"] == pytest.approx(row["prompt_logprobs_ms"] / row["median_ms"], 0.01)
    result = CliRunner().invoke(main, ["bench", *command, "--shared-tokens", "32", *SMALL])
    assert result.exit_code == 2
    assert "--prompt-logprobs takes no tokens from the prefix cache" in result.output


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cancel --repeats 0", "'--repeats': 0 is not in the range x>=1"),
        ("cancel --step-ms -1", "'--step-ms': -1.0 is not in the range"),
        ("cancel --step-ms nan", "'--step-ms': 'nan' is not finite"),
        ("conversations --prompt-seed -1", "'--prompt-seed': -1 is not in the range"),
        ("decode --batch-size 0", "'--batch-size': 0 is not"),
        ("decode --steps 0", "'--steps': 0 is not"),
        ("decode --profile /no/such/trace", "'--profile': /no/such/trace cannot be written"),
        ("decode --temperature -1", "'--temperature': -1.0 is not"),
        ("gateway --turns 0", "'--turns': 0 is not"),
        ("offline --requests 0", "'--requests': 0 is not"),
        ("offline --input-length 0 0", "'--input-length': 0 is not"),
        ("offline --output-length 64 16", "'--output-length': MIN 64 exceeds MAX 16"),
        ("offline --prompt-seed -1", "'--prompt-seed': -1 is not in the range"),
        ("offline --top-p nan", "'--top-p': 'nan' is not finite"),
        ("perf-analyzer --input-words 0", "'--input-words': 0 is not"),
        ("plan-broadcast --steps 0", "'--steps': 0 is not"),
        ("prefill --repeats 0", "'--repeats': 0 is not"),
        ("prefixes --prompt-seed -1", "'--prompt-seed': -1 is not in the range"),
        ("response-path --requests 0", "'--requests': 0 is not"),
        ("response-path --tokens 7", "'--tokens': 7 is not"),
        ("router --seconds inf", "'--seconds': 'inf' is not finite"),
        ("router --seed -1", "'--seed': -1 is not in the range"),
        ("serve --range-ratio nan", "'--range-ratio': 'nan' is not finite"),
        ("serve --seed -1", "'--seed': -1 is not in the range"),
        ("serve --temperature nan", "'--temperature': 'nan' is not finite"),
        ("server-share --clients 0", "'--clients': 0 is not"),
        ("scaling --steps 0", "'--steps': 0 is not"),
    ],
)
def test_options_that_cannot_be_measured_are_wrong_usage(command: str, message: str) -> None:
    result = CliRunner().invoke(main, ["bench", *command.split()])
    assert result.exit_code == 2
    assert f"Invalid value for {message}" in result.output


@pytest.mark.parametrize(
    "command",
    [
        "decode --max-running-requests 8",
        "decode --compare max_running_requests=8",
        "adapters --max-running-requests 8",
    ],
)
def test_a_batch_beyond_the_rows_is_refused(command: str) -> None:
    result = CliRunner().invoke(main, ["bench", *command.split(), "--batch-size", "9", *SMALL])
    assert result.exit_code == 2
    assert "a batch of 9 needs max_running_requests" in result.output


def test_a_rank_beyond_the_option_is_refused_before_adapters_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minisgl_kit.adapters.write_adapter", pytest.fail)
    result = CliRunner().invoke(main, ["bench", "adapters", "--rank", "513", *SMALL])
    assert result.exit_code == 2
    assert "max_lora_rank must be at most 512, got 513" in result.output


def test_more_requests_than_the_queue_takes_are_refused() -> None:
    bounds = ["--max-running-requests", "2", "--max-queued-requests", "1"]
    result = CliRunner().invoke(main, ["bench", "offline", "--requests", "4", *bounds, *SMALL])
    assert result.exit_code == 2
    assert "Error: queue full: 3 requests open of at most 3" in result.output


def test_options_of_a_gpu_are_refused_on_a_cpu() -> None:
    for name, value in (("moe_backend", "fused"), ("attention_backend", "fa")):
        with pytest.raises(ConfigError, match=name):
            build_engine(EngineOptions.from_mapping({"device": "cpu", name: value}))


def test_a_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs an NVIDIA GPU"):
        build_engine(EngineOptions(device="cuda"))


@pytest.mark.parametrize(("num_pages", "is_warned"), [(4, True), (5, False)])
def test_pages_that_hold_less_than_the_context_are_warned_of(
    num_pages: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The last of 81 tokens needs no position."""
    options = EngineOptions(device="cpu", num_pages=num_pages, max_sequence_length=81)
    with caplog.at_level(logging.WARNING):
        build_engine(options).close(drain_s=0)
    text = f"the KV pages hold {16 * num_pages} tokens, the context has 81"
    assert (text in caplog.text) == is_warned
