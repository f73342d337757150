"""Figures as a table."""

from __future__ import annotations

import pytest

from minisgl_kit.report import Report, shown


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, "-"),
        (0.0, "0.00"),
        (0.125, "0.12"),
        (0.00234, "0.0023"),
        (-0.00234, "-0.0023"),
        (1234.5, "1,234"),
        (-1234.5, "-1,234"),
        (1234, "1,234"),
        ("2/3", "2/3"),
    ],
)
def test_cells(value: object, cell: str) -> None:
    assert shown(value) == cell


def test_a_figure_that_there_is_not_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("times")
    report.add(kernel="norm", us=1.5, library=None)
    report.emit()
    assert "norm │ 1.50 │       - │" in capsys.readouterr().out
    assert report.content()["library"] is None
