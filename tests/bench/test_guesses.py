"""`minisgl bench guesses`: texts that repeat themselves or the prompt, and texts that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_bench.guesses import replayed
from tests.figures import figures_of

WORDS = "the cat sat on a mat and said that it had never been so well fed in all of its life"


def test_an_answer_that_repeats_the_prompt_takes_few_steps(tmp_path: Path) -> None:
    prompt, other = tmp_path / "prompt.txt", tmp_path / "other.txt"
    prompt.write_text(WORDS, encoding="utf-8")
    other.write_text("zyx wvu tsr qpo nml kji hgf edc ba", encoding="utf-8")
    command = ["guesses", str(prompt), str(other), "--prompt", str(prompt)]
    rows: list[dict[str, Any]] = figures_of(command, tmp_path)["rows"]
    again, new = rows
    assert all(sum(row["right_by_place"]) == row["right"] for row in rows)
    assert [row["answer"] for row in rows] == ["prompt.txt", "other.txt"]
    assert again["right"] > 0.9 * again["guesses"] and again["tokens_a_step"] > 2.5
    assert new["right"] < 0.2 * new["tokens"] and new["tokens_a_step"] < 1.3


def test_what_is_guessed_right_takes_no_steps() -> None:
    tokens = np.arange(50, dtype=np.int32)
    (again,) = replayed(tokens, [tokens], most_guesses=7)
    assert again.num_steps == again.num_checks + 3 - 1, "the first sample is the prompt's"
    assert again.num_right == again.num_guesses == 49 - again.num_steps
    assert len(again.num_right_by_place) == 7
    assert sum(again.num_right_by_place) == again.num_right
    assert again.num_right_by_place[0] == again.num_checks
    (new,) = replayed(tokens, [100 + tokens], most_guesses=7)
    assert (new.num_steps, new.num_checks) == (49, 0)


def test_answers_are_looked_for_in_those_before_them() -> None:
    prompt, answer = np.arange(9, dtype=np.int32), np.arange(100, 150, dtype=np.int32)
    for recent_tokens, gains in ((0, False), (100, True), (20, False)):
        replays = replayed(prompt, [answer, answer], most_guesses=7, recent_tokens=recent_tokens)
        first, second = replays
        assert (first.num_steps, first.num_checks) == (49, 0)
        assert (second.num_right > 40) == gains


@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_text_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, ["bench", "guesses", str(file)])
    assert result.exit_code == (0 if text else 2), result.output


def test_short_texts_have_as_many_guesses_as_long_ones() -> None:
    tokens = np.array([1, 2, 3] * 5, np.int32)
    (replay,) = replayed(tokens[:6], [tokens], most_guesses=64)
    assert (replay.num_checks, replay.num_guesses) == (1, 13)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["binary"], "binary is not a text in UTF-8"),
        (["text", "--prompt", "binary"], "binary is not a text in UTF-8"),
        (["text", "--tokenizer", "."], "the tokenizer of . cannot be loaded"),
        (["text", "--speculative-recent-tokens", "2000000"], "is not in the range"),
    ],
)
def test_what_cannot_be_read_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("text").write_text("a b c", encoding="utf-8")
    result = CliRunner().invoke(main, ["bench", "guesses", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output.replace("\n", " ")
