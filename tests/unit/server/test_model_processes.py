"""What the supervisor reports about the models' processes."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl_backend.runtime_files import Heartbeat, read_beat, socket_path
from minisgl_backend.server import model_processes
from minisgl_backend.server.model_processes import ModelProcess, ModelProcesses
from minisgl_backend.server.stats import server_stats
from tests.waiting import PATIENCE_S


def process(directory: Path, model: str) -> ModelProcess:
    page = Heartbeat(directory, model).path
    beat = read_beat(page)
    assert beat is not None
    return ModelProcess(page, model, beat, is_alive=True)


def listening(directory: Path, model: str) -> socket.socket:
    """A socket that takes the calls for a model's counts."""
    listener = socket.socket(socket.AF_UNIX)
    listener.settimeout(PATIENCE_S)
    listener.bind(str(socket_path(directory, model, os.getpid())))
    listener.listen()
    return listener


def models_of(directory: Path, *processes: ModelProcess) -> list[dict[str, Any]]:
    server = SimpleNamespace(
        directory=directory, pid=os.getpid(), poll=lambda: None, shared_memory_regions=list
    )
    models: list[dict[str, Any]] = server_stats(cast(Any, server), processes)["models"]
    return models


def test_processes_are_asked_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them answers before all have been asked."""
    monkeypatch.setattr(model_processes, "_ANSWER_S", PATIENCE_S)
    names = ("llm_engine", "tokenizer", "detokenizer")
    with ExitStack() as sockets:
        listeners = [sockets.enter_context(listening(tmp_path, name)) for name in names]

        def answer() -> None:
            callers = [listener.accept()[0] for listener in listeners]
            for name, caller in zip(names, callers, strict=True):
                with caller:
                    caller.sendall(b'{"answers_as": "%s"}' % name.encode())

        thread = threading.Thread(target=answer)
        thread.start()
        models = models_of(tmp_path, *(process(tmp_path, name) for name in names))
        thread.join()
    assert [(it["model"], it["answers_as"]) for it in models] == [(it, it) for it in names]


def test_a_process_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_processes, "_ANSWER_S", 0.01)
    with listening(tmp_path, "hangs"):
        models = models_of(tmp_path, process(tmp_path, "hangs"), process(tmp_path, "gone"))
    assert [it["error"] for it in models] == ["does not answer", "does not answer"]
    assert {it["pid"] for it in models} == {os.getpid()}
    assert models_of(tmp_path) == []


def test_a_process_may_have_mapped_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    page = Heartbeat(tmp_path, "llm_engine").path
    named = os.fsencode(tmp_path) + b"/weights-\xe9"
    with open(named, "w+b") as file:
        file.write(b"weights")
        file.flush()
        with mmap.mmap(file.fileno(), 0):
            processes = ModelProcesses(tmp_path)
            (found,) = processes.look()
            processes.close()
    assert found.heartbeat == page and found.is_alive
