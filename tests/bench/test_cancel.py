"""`minisgl bench cancel`, and the journal that it reads."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import Event, Finished, Request, RequestId, SamplingParams
from minisgl_bench.cancel import Bench, Ending, summary
from minisgl_bench.engines import submitted
from minisgl_bench.journal import Entry, Journal
from minisgl_bench.paced import journaled, paced_engine, script_of
from minisgl_check.processes import children_of
from tests.figures import figures_of


def test_figures_of_endings() -> None:
    endings = [Ending(0.1, 0.2, 3), Ending(0.3, 0.5, 1), Ending(None, None, 9)]
    assert summary(endings) == {
        "ended": "2/3",
        "p50_ms": pytest.approx(200),
        "max_ms": pytest.approx(300),
        "rows_and_pages_back": "2/3",
        "back_max_ms": pytest.approx(500),
        "max_tokens_after": 9,
    }
    assert summary([Ending(None, None, 0)])["p50_ms"] == "-"


def test_a_journal_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    entry = Entry(1.5, "added", [4], 0, 0)
    line = json.dumps(
        {"time_s": 1.5, "what": "added", "request_ids": [4], "num_running": 0, "num_used_pages": 0}
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(line[:20])
        file.flush()
        assert len(journal.read()) == 0
        file.write(line[20:] + "\n")
        file.flush()
        assert len(journal.read()) == 1
    assert journal.read() == [entry]
    assert journal.find(lambda entry: entry.what == "added", since=0, timeout_s=0) == entry
    assert journal.find(lambda entry: entry.what == "added", since=1, timeout_s=0) is None
    journal.close()


@pytest.mark.parametrize("num_guesses", [0, 5])
def test_a_paced_engine_says_its_text_guessed_or_not(num_guesses: int) -> None:
    options = EngineOptions(cache="naive", speculative_tokens=num_guesses)
    engine = paced_engine(options, step_s=0.001, text="again and " * 8 + "on")
    try:
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        sink = submitted(engine, np.arange(1, 20, dtype=np.int32), sampling)
        sink.wait()
        stats = engine.stats().scheduler
    finally:
        engine.close(drain_s=0)
    script = script_of(options.model, "again and " * 8 + "on")
    assert sink.tokens == np.resize(script, 40).tolist()
    assert (stats.num_right_guesses > 0) == (num_guesses > 0)


def test_a_paced_engine_keeps_a_journal(tmp_path: Path) -> None:
    """One request runs to its end, one is aborted; rows and pages are reported and given back."""
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    engine = paced_engine(EngineOptions(cache="naive"), step_s=0.001, parts=journaled(path))
    ended: dict[int, threading.Event] = {}

    def submit(max_tokens: int) -> RequestId:
        request = Request(
            id=engine.new_id(),
            prompt=np.arange(1, 20, dtype=np.int32),
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        )
        event = ended[request.id] = threading.Event()

        def sink(received: Event) -> None:
            if isinstance(received, Finished):
                event.set()

        engine.submit(request, sink)
        return request.id

    try:
        first = submit(3)
        assert ended[first].wait(30)
        second = submit(8000)
        assert journal.find(
            lambda entry: entry.what == "sampled" and second in entry.request_ids,
            since=0,
            timeout_s=30,
        )
        engine.abort(engine.new_id())  # the id of no request
        engine.abort(second)
        assert ended[second].wait(30)
    finally:
        engine.close(drain_s=0)
    len(journal.read())
    of_first = [entry.what for entry in journal.read() if entry.request_ids == [first]]
    assert of_first == ["added", "admitted", "sampled", "sampled", "sampled"]
    aborted = [entry.request_ids for entry in journal.read() if entry.what == "aborted"]
    assert aborted == [[second]]
    admitted = next(entry for entry in journal.read() if entry.what == "admitted")
    assert (admitted.num_running, admitted.num_used_pages) == (1, 2)
    assert (journal.read()[-1].num_running, journal.read()[-1].num_used_pages) == (0, 0)
    times = [entry.time_s for entry in journal.read()]
    assert times == sorted(times)
    journal.close()


def test_a_client_goes_with_an_interrupted_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would see the server go, and show a traceback."""

    def interrupted(*_: object, **__: object) -> Entry:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "find", interrupted)
    before = {*children_of(os.getpid())}
    journal = Journal(tmp_path / "journal.jsonl")
    server: Any = SimpleNamespace(grpc_port=1)
    with pytest.raises(KeyboardInterrupt):
        Bench(server, None, journal, random.Random(0), 1.0).leave_once("grpc-kill", "queued")
    journal.close()
    assert {*children_of(os.getpid())} <= before


@pytest.mark.server
def test_all_ways_of_leaving(tmp_path: Path) -> None:
    command = ["cancel", "--repeats", "1", "--phases", "later-token", "--patience", "60"]
    rows = figures_of(command, tmp_path)["rows"]
    assert [row["way"] for row in rows] == [
        "grpc-cancel",
        "grpc-kill",
        "http-close",
        "gateway-close",
    ]
    for row in rows:
        assert row["ended"] == row["rows_and_pages_back"] == "1/1"
        assert 0 < row["p50_ms"] <= row["back_max_ms"]


def test_an_unknown_way_is_refused() -> None:
    result = CliRunner().invoke(main, ["bench", "cancel", "--ways", "grpc-cancel,telepathy"])
    assert result.exit_code == 2
    assert (
        "'telepathy' is none of grpc-cancel, grpc-kill, http-close, gateway-close" in result.output
    )
