"""The result of a case, and the report of all cases: one table, the failures, the figures.

Knows names and numbers only. A case without failures passed; one that was not run says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from minisgl_kit.report import Report, write_json

_MOST_SHOWN: Final = 8
"""The most failures of one case that are printed; the file has all."""


@dataclass(slots=True)
class Case:
    """One line of the table. ``count`` is the number of requests, or of other attempts."""

    name: str
    count: int = 0
    what: str = ""
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    """How many requests were answered, refused, cut off, or failed."""
    seconds: float = 0.0
    is_skipped: bool = False

    def expect(self, condition: object, failure: str) -> None:
        """Note the failure unless the condition holds."""
        if not condition:
            self.failures.append(failure)

    @property
    def result(self) -> str:
        """``pass``, ``FAIL`` or ``skipped``."""
        if self.failures:
            return "FAIL"
        return "skipped" if self.is_skipped else "pass"


def skipped(name: str, why: str) -> Case:
    """A case that this server does not allow."""
    return Case(name, what=why, is_skipped=True)


class Cases:
    """The cases so far, each name once: rounds of a long run add up."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def add(self, case: Case) -> None:
        """Print the case, and keep it."""
        told = case.failures[0] if case.failures else case.what
        click.echo(f"{case.result:8}{case.name}: {told}")
        before = self._cases.setdefault(case.name, case)
        if before is not case:
            before.count += case.count
            before.seconds += case.seconds
            before.failures += case.failures
            before.ended += case.ended
            before.what, before.figures = case.what, case.figures

    @property
    def has_failed(self) -> bool:
        """Whether any case has failed."""
        return any(case.failures for case in self._cases.values())

    def emit(self, info: Mapping[str, Any], json_path: Path | None) -> None:
        """Print the table, the failures and the figures; the file has the same.

        If an interruption came before the first case, only the file is written.
        """
        cases = list(self._cases.values())
        table = Report("check", info=info)
        for case in cases:
            table.add(
                case=case.name,
                result=case.result,
                count=case.count,
                seconds=case.seconds,
                what=case.what,
            )
        if cases:
            table.emit()
        ended = sum((case.ended for case in cases), Counter[str]())
        figures = {f"requests {how}": count for how, count in sorted(ended.items())}
        figures |= {name: value for case in cases for name, value in case.figures.items()}
        if figures:
            shown = Report("figures", info=info)
            for name, value in figures.items():
                shown.add(figure=name, value=value)
            shown.emit()
        for case in cases:
            if case.result == "skipped":
                click.echo(f"skipped {case.name}: {case.what}")
            for failure in case.failures[:_MOST_SHOWN]:
                click.echo(f"FAIL {case.name}: {failure}")
            if len(case.failures) > _MOST_SHOWN:
                click.echo(f"FAIL {case.name}: and {len(case.failures) - _MOST_SHOWN} more")
        if json_path is not None:
            content = {
                "info": table.info,
                "cases": [
                    {
                        "case": case.name,
                        "result": case.result,
                        "count": case.count,
                        "seconds": case.seconds,
                        "ended": dict(case.ended),
                        "what": case.what,
                        "failures": case.failures,
                    }
                    for case in cases
                ],
                "figures": figures,
                "skipped": [case.name for case in cases if case.result == "skipped"],
            }
            write_json(json_path, content)
