"""The label of an engine's metrics: who may take it over, and who must not."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.tritonserver.series import SeriesLabel

KILLED = """
import os, signal, sys
from pathlib import Path
from minisgl_backend.tritonserver.series import SeriesLabel
label = SeriesLabel(Path(sys.argv[1]), "demo")
print(label.value, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(directory: Path) -> str:
    """The label of an engine that was killed."""
    command = [sys.executable, "-c", KILLED, str(directory)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return ended.stdout.strip()


def test_the_label_of_an_engine_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    first = killed(tmp_path)
    assert first
    assert killed(tmp_path) == first
    label = SeriesLabel(tmp_path, "demo")
    assert label.value == first
    label.release()


def test_a_lock_may_end_later_than_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = killed(tmp_path)
    (path,) = tmp_path.iterdir()
    with path.open() as late:
        fcntl.flock(late, fcntl.LOCK_EX)
        monkeypatch.setattr("time.sleep", lambda _: late.close())
        label = SeriesLabel(tmp_path, "demo")
    assert label.value == value
    label.release()


def test_an_engine_that_lives_keeps_its_label(tmp_path: Path) -> None:
    first = SeriesLabel(tmp_path, "demo")
    second = SeriesLabel(tmp_path, "demo")
    assert first.value != second.value
    second.release()
    third = SeriesLabel(tmp_path, "demo")
    assert third.value not in (first.value, second.value)
    for label in (first, third):
        label.release()


def test_labels_of_engines_that_lived_side_by_side_are_taken_over_one_by_one(
    tmp_path: Path,
) -> None:
    first = SeriesLabel(tmp_path, "demo")
    second = killed(tmp_path)
    first.release()
    third = SeriesLabel(tmp_path, "demo")
    assert third.value == second
    fourth = killed(tmp_path)
    third.release()
    assert fourth != second and killed(tmp_path) == fourth


def test_series_that_are_gone_are_not_taken_over(tmp_path: Path) -> None:
    first = SeriesLabel(tmp_path, "demo")
    first.release()
    first.release()
    assert not list(tmp_path.iterdir())
    second = SeriesLabel(tmp_path, "demo")
    assert second.value != first.value
    second.release()


def test_each_model_and_each_directory_has_its_own(tmp_path: Path) -> None:
    dead = killed(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    labels = [
        SeriesLabel(tmp_path, "another"),
        SeriesLabel(other, "demo"),
        SeriesLabel(other / "missing", "demo"),
        SeriesLabel(None, "demo"),
    ]
    values = {label.value for label in labels}
    assert len(values) == len(labels)
    assert dead not in values
    for label in labels:
        label.release()
