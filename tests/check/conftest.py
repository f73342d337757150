"""A server for this folder's tests: sound, until a test asks it to break a promise."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl_backend.server.repository import shipped_repository
from minisgl_check import bad_inputs, bad_wire, refusals
from minisgl_check.bad_inputs import Bad
from minisgl_check.own_server import OwnServer, started

HERE = Path(__file__).parent


@pytest.fixture
def few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the catalogues what is said of one parameter; `test_short` tries them all."""

    def catalogue(**facts: int) -> list[Bad]:
        return [bad for bad in bad_inputs.catalogue(**facts) if "temperature" in bad.name]

    few = [body for body in bad_wire.bodies() if body.name in ("NaN", "no JSON")]
    monkeypatch.setattr(refusals, "catalogue", catalogue)
    monkeypatch.setattr(refusals, "bodies", lambda: few)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """Its engine takes 5 ms a step, and breaks what the file `defect` in its repository names."""
    repository = tmp_path_factory.mktemp("broken") / "model_repository"
    shutil.copytree(shipped_repository(), repository)
    for model, source in (
        ("llm_engine", "broken_engine.py"),
        ("tokenizer", "broken_tokenizer.py"),
        ("detokenizer", "broken_detokenizer.py"),
    ):
        shutil.copy(HERE / source, repository / model / "1" / "model.py")
    with started(repository=repository) as server:
        yield server
