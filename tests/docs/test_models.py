"""The table of models says what the code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl_backend.models.catalog import ARCHITECTURES, load_spec
from minisgl_backend.models.kernel_choice import has_fused_layers
from minisgl_backend.models.spec import ModelSpec
from tests.conformance.checkpoints import CASES

DOCS = Path(__file__).parents[2] / "docs"
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in (DOCS / "adding_a_model.md").read_text(encoding="utf-8").splitlines()
    if len(cells := [cell.strip() for cell in line.strip("| ").split(" | ")]) >= 4
    and cells[0].strip("`") in ARCHITECTURES
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, ModelSpec]]:
    """The spec of each case, by its architecture."""
    found: dict[str, dict[str, ModelSpec]] = {}
    for case, make in CASES.items():
        folder = tmp_path_factory.mktemp(case)
        model = make()
        values = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        (folder / "config.json").write_text(json.dumps(values))
        spec = load_spec(folder)
        found.setdefault(spec.architecture, {})[case] = spec
    return found


def test_every_architecture_has_a_row() -> None:
    assert ROWS.keys() == set(ARCHITECTURES)
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert {name for name in ARCHITECTURES if f"`{name}`" in readme} == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_is_true(architecture: str, specs: dict[str, dict[str, ModelSpec]]) -> None:
    _, cases, fused, *_ = ROWS[architecture]
    assert all(case.startswith(cases.strip("`")) for case in specs[architecture])
    for spec in specs[architecture].values():
        without_latents = fused == "yes, without latents" and spec.latent is None
        assert has_fused_layers(spec) == (fused == "yes" or without_latents)
