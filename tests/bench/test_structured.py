"""The benchmark of structured answers, run on a small scale with the demo model."""

from __future__ import annotations

import json
from pathlib import Path

from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_bench.dummy_model import SHAPES
from minisgl_bench.structured import Streams, bias_to_end_strings, endless_schema
from tests.figures import figures_of


def test_rates_first_tokens_and_masks(tmp_path: Path) -> None:
    command = ["structured", "--device", "cpu", "--num-pages", "128", "--requests", "5"]
    figures = figures_of(
        [*command, "--input-length", "8", "--output-length", "12", "--rounds", "1"], tmp_path
    )
    rates = figures["throughput"]
    assert [(row["constrained"], row["schemas"]) for row in rates] == [
        ("0 %", "-"),
        ("20 %", "known"),
        ("100 %", "known"),
        ("100 %", "new"),
    ]
    for row in rates:
        assert row["share"] > 0 and row["tokens_per_s"] > 0 and row["plain_tokens_per_s"] > 0
    assert [row["schema"] for row in figures["first_token"]] == ["none", "new", "known"]
    assert figures["first_token"][0]["later_ms"] == 0
    assert [row["white_space"] for row in figures["alone"]] == ["allowed", "none"]
    for row in figures["alone"]:
        assert (row["tokens"], row["guesses"], row["tokens_per_step"]) == (12, 0, 1)
    assert [row["vocabulary"] for row in figures["masks"]] == ["2,048", "151,936"]
    assert all(row["mask_p50"] > 0 and row["rows"] == 5 for row in figures["masks"])
    assert figures["info"]["requests"] == 5


def test_tokens_of_a_step_with_guesses(tmp_path: Path) -> None:
    command = ["structured", "--device", "cpu", "--num-pages", "128", "--requests", "2"]
    command += ["--speculative-tokens", "5", "--rounds", "1"]
    figures = figures_of([*command, "--input-length", "8", "--output-length", "60"], tmp_path)
    for row in figures["alone"]:
        assert row["tokens"] == 60 and 0 < row["right"] <= row["guesses"]
        assert row["tokens_per_step"] == round(60 / (60 - row["right"]), 2) > 1


def test_the_text_part_of_a_model_and_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """The size of the vocabulary is in ``text_config`` there; it was looked for beside that."""
    model, text = tmp_path / "model", {**SHAPES["qwen3.6-27b"], "vocab_size": 2048}
    model.mkdir()
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    bias = bias_to_end_strings(EngineOptions(model=str(model), tokenizer=DEMO_MODEL))
    assert bias == bias_to_end_strings(EngineOptions())
    pieces = load_vocabulary(Path(DEMO_MODEL)).pieces
    assert all(pieces[token].startswith(b'"') for token, _ in bias)


def test_schemas_of_a_run_differ_and_are_spread_evenly() -> None:
    streams = Streams(requests=20, input_length=1, output_length=1, temperature=1.0)
    some = streams.grammars(0.2, 7)
    assert [index for index, grammar in enumerate(some) if grammar] == [4, 9, 14, 19]
    all_of_them = streams.grammars(1.0, 7)
    assert len({grammar.source for grammar in all_of_them if grammar}) == 20
    assert all_of_them[0] == endless_schema(7, None)
    assert streams.grammars(0.0, 7) == [None] * 20
