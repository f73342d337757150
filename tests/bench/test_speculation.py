"""`minisgl bench speculation`: what it measures, and what it refuses to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.models.catalog import load_spec
from minisgl_bench.dummy_model import LAYERS
from tests.figures import figures_of


def test_steps_that_check_guesses_beside_plain_ones(tmp_path: Path) -> None:
    sizes = ["--batch-size", "1", "--batch-size", "2", "--prompt-tokens", "20"]
    arguments = ["--speculative-tokens", "3", "--output-tokens", "20", *sizes]
    figures = figures_of(["speculation", *arguments], tmp_path)
    assert [(row["batch"], row["guesses"]) for row in figures["rows"]] == [(1, 3), (2, 3)]
    assert all(row["plain_ms"] > 0 and row["check_ms"] > 0 for row in figures["rows"])


def test_steps_that_check_guesses_of_an_eagle_layer(tmp_path: Path) -> None:
    """For the demo model, which has too few layers for those that are read by default."""
    model = load_spec(Path(DEMO_MODEL))
    config = {
        **LAYERS["eagle3-qwen3-0.6b"],
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--speculative-mtp-tokens", "3", "--speculative-mtp-model", str(tmp_path)]
    arguments += ["--output-tokens", "20", "--batch-size", "1", "--prompt-tokens", "20"]
    figures = figures_of(["speculation", *arguments, "--load-format", "dummy"], tmp_path)
    assert [(row["batch"], row["guesses"]) for row in figures["rows"]] == [(1, 3)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "--speculative-mtp-tokens must be above 0"),
        (
            "--speculative-tokens 3 --speculative-mtp-tokens 1",
            "exactly one of --speculative-",
        ),
        ("--speculative-tokens 3 --batch-size 9", "--batch-size is at most"),
        ("--speculative-tokens 3 --max-prefill-tokens 63", "must be at least 64, so that a step"),
        ("--speculative-tokens 3 --output-tokens 1", "is not in the range x>=2"),
        ("--speculative-tokens 3 --output-tokens 4", "must be above 4, for a whole check"),
    ],
)
def test_what_would_not_be_measured_is_refused(arguments: str, complaint: str) -> None:
    result = CliRunner().invoke(main, ["bench", "speculation", *arguments.split()])
    assert result.exit_code == 2
    assert complaint in result.output.replace("\n", " ")
