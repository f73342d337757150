"""What benchmarks write with ``--json``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from minisgl_backend.cli.main import main


def figures_of(command: Sequence[str], folder: Path) -> dict[str, Any]:
    """The content of the file that ``minisgl bench COMMAND`` writes; the command must succeed."""
    file = folder / "figures.json"
    result = CliRunner().invoke(main, ["bench", *command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return figures
