"""What was found before a server was gone is told, too."""

from __future__ import annotations

import re
from random import Random

import pytest

from minisgl_check import refusals, run
from minisgl_check.case import Case
from minisgl_check.invariants import Invariants
from minisgl_check.target import Stats, Target

NOBODY = Target("127.0.0.1:1", "http://127.0.0.1:1", "http://127.0.0.1:1")
IDLE = Stats({"models": [], "tritonserver": {}})


def test_the_input_that_kills_the_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "stats", lambda _: IDLE)
    (case,) = refusals.hostile_grammars(NOBODY, 3, Random(0), is_timed=False)
    found, last = case.failures
    assert re.match(r"\S.* 0: no answer: ConnectionRefusedError", found)
    assert re.match(r"nothing answers after '\S.* 0'", last)
    assert case.figures["hostile grammars, clean"] == 0


def test_a_server_that_is_gone_when_its_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([IDLE, IDLE])

    def stats(_: Target) -> Stats:
        for counts in told:
            return counts
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(Target, "stats", stats)
    monkeypatch.setattr(Target, "is_ready", lambda _: True)
    (case,) = refusals.hostile_grammars(NOBODY, 3, Random(0), is_timed=False)
    *found, last = case.failures
    assert [one.partition(": ")[2][:10] for one in found] == ["no answer:"] * 3
    assert last == "nothing answers any more: nobody is there"
    assert case.figures["hostile grammars, tried"] == 3


def test_a_server_that_is_gone_after_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def violations(_: Invariants) -> list[str]:
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(Invariants, "violations", violations)
    invariants = object.__new__(Invariants)
    found = Case("over gRPC", failures=["was answered"])
    cases = run._held("bad inputs", lambda: [found], invariants)
    assert [(case.name, case.failures) for case in cases] == [
        ("over gRPC", ["was answered"]),
        ("bad inputs", ["stumbled over ConnectionRefusedError: nobody is there"]),
    ]
