"""What refuses bad input must not be an ``assert``: it works under ``python -O`` as well."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_CASES = "tests/unit/wire/test_parse.py", "tests/unit/text/test_template.py"


def test_bad_inputs_are_refused_without_asserts() -> None:
    # the warning says that asserts outside of tests do nothing, which is the point
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", *_CASES]
    ignored = "ignore:assertions not in test modules:pytest.PytestConfigWarning"
    result = subprocess.run(
        [*command, "-W", ignored],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
