"""A server for this folder's tests: sound, until a test asks it to break a promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pytest

from minisgl_check import bad_inputs, bad_wire, refusals
from minisgl_check.bad_inputs import Bad
from minisgl_check.own_server import OwnServer, started
from minisgl_kit.repositories import repository_with

MODELS: Final = {
    "llm_engine": "from tests.check.broken_engine import TritonPythonModel",
    "tokenizer": "from tests.check.broken_text_models import Tokenizer as TritonPythonModel",
    "detokenizer": "from tests.check.broken_text_models import Detokenizer as TritonPythonModel",
}


@pytest.fixture
def few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only the catalogues' entries for one parameter; `test_short` tries them all."""

    def catalogue(**facts: int) -> list[Bad]:
        return [bad for bad in bad_inputs.catalogue(**facts) if "temperature" in bad.name]

    few = [body for body in bad_wire.bodies() if body.name in ("NaN", "no JSON")]
    monkeypatch.setattr(refusals, "catalogue", catalogue)
    monkeypatch.setattr(refusals, "bodies", lambda: few)


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnServer]:
    """Its engine takes 5 ms per step, and breaks the promise that is switched to `Broken`."""
    repository = repository_with(MODELS, tmp_path_factory.mktemp("broken"))
    with started(repository=repository) as server:
        yield server
