"""Two trees measured in turns; here the trees have one module that writes figures at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.gpu.before_after import PARTS, before_after, compared

CLI = """
import json, pathlib, sys
if "dummy-model" in sys.argv:
    pathlib.Path(sys.argv[-1]).mkdir()
else:
    with open({journal!r}, "a") as file:
        print({tree!r}, sys.argv[2], file=file)
    rows = [{{"batch": 1, "prompt_tokens": 128, "step_ms": {value}, "median_ms": {value},
             "tokens_per_s": 1000 / {value}}}]
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({{"rows": rows}}))
"""


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Which tree ran which benchmark, one per line; ``base`` takes 4 and ``here`` 2 ms per step."""
    journal = tmp_path / "journal"
    for tree, value in (("base", 4.0), ("here", 2.0)):
        package = tmp_path / tree / "minisgl_backend" / "cli"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        program = CLI.format(journal=str(journal), tree=tree, value=value)
        (package / "__main__.py").write_text(program)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("OUT", str(tmp_path))
    return journal


def test_trees_take_turns_and_each_runs_its_own_code(journal: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(before_after, [str(tmp_path / "base"), "decode", "offline"])
    assert done.exit_code == 0, done.output
    assert journal.read_text().splitlines() == [
        *["base decode", "here decode"] * 2,
        *["base offline", "here offline"] * 2,
    ]
    report = json.loads((tmp_path / "before_after.json").read_text())
    assert [(row["part"], row["gain"]) for row in report["rows"]] == [("decode", 2), ("offline", 2)]
    assert "2.000" in done.output


def test_a_run_that_fails_says_what_it_printed(journal: Path, tmp_path: Path) -> None:
    program = tmp_path / "base" / "minisgl_backend" / "cli" / "__main__.py"
    program.write_text("print('no GPU'); raise SystemExit(3)")
    done = CliRunner().invoke(before_after, [str(tmp_path / "base"), "decode"])
    assert done.exit_code == 1
    assert "no GPU" in done.output


def test_the_spread_is_that_of_the_least_steady_tree() -> None:
    steady, unsteady = [{"": 10.0}, {"": 10.0}], [{"": 9.0}, {"": 11.0}]
    (row,) = compared(PARTS["prefill"], steady, unsteady)
    assert row["gain"] == 1
    assert row["spread"] == pytest.approx(0.1)
