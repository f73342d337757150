"""`minisgl chat`, in a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from minisgl_backend.server.process import TritonServer
from tests.client.commands import GREEDY, MINISGL, run
from tests.client.engine import Engine
from tests.client.ways import url_of
from tests.server.client import PATIENCE_S, Call, Metrics, wait_for

pytestmark = pytest.mark.server


class Terminal:
    """A chat in a terminal wide enough for all figures; ``say`` first waits for the prompt."""

    def __init__(self, server: TritonServer, history: Path, *words: str) -> None:
        url = url_of(server, "grpc")
        self.child = pexpect.spawn(
            MINISGL[0],
            [*MINISGL[1:], "chat", "--url", url, "--history", str(history), *GREEDY, *words],
            encoding="utf-8",
            timeout=PATIENCE_S * 2,
            dimensions=(40, 160),
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )

    def say(self, line: str, *expected: str) -> tuple[str, ...]:
        """Type a line when the terminal is ready for it; these patterns must follow.

        Returns the groups of the last pattern.
        """
        self.child.expect(r"\x1b\[\?2004h.*>")
        self.child.send(line)
        groups: tuple[str, ...] = ()
        for pattern in expected:
            self.child.expect(pattern)
            assert isinstance(self.child.match, re.Match)
            groups = self.child.match.groups()
        return groups

    def end(self, keys: str = "\x04") -> None:
        self.say(keys)
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert self.child.exitstatus == 0


@contextmanager
def chat(server: TritonServer, history: Path, *words: str) -> Iterator[Terminal]:
    terminal = Terminal(server, history, *words)
    try:
        yield terminal
    finally:
        terminal.child.close(force=True)


FIGURES = (
    r"(\d+) tokens, [\d.]+ tokens/s · first after \d+ ms · (\d+) of (\d+) prompt tokens cached"
)


def test_sigterm_ends_a_chat_that_ctrl_c_does_not_end(server: TritonServer, tmp_path: Path) -> None:
    with chat(server, tmp_path / "history") as terminal:
        terminal.say("\x03")
        terminal.say("")
        terminal.child.kill(signal.SIGTERM)
        terminal.child.expect(pexpect.EOF)
        terminal.child.close()
        assert terminal.child.signalstatus == signal.SIGTERM


def test_samples_come_one_after_the_other(server: TritonServer, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    with chat(server, tmp_path / "history", "-p", "n=3") as terminal:
        question = "What is the capital of France?\r"
        terminal.say(question, "Paris", "---", "Paris", "---", "Paris", "12 tokens")
        terminal.say(f"/save {saved}\r", "2 messages in")
        terminal.end()
    assert json.loads(saved.read_text("utf-8"))["messages"][1]["content"] == "Paris"


def test_a_history_that_cannot_be_written_is_told_once(
    server: TritonServer, tmp_path: Path
) -> None:
    history = tmp_path / "state" / "history"
    with chat(server, history) as terminal:
        terminal.child.expect(r"/help lists commands")
        history.unlink()
        history.parent.rmdir()
        question = "What is the capital of France?\r"
        terminal.say(question, "the history is not kept: .*No such file", "Paris", FIGURES)
        (before,) = terminal.say("\x1b[A\r", "(.*)Paris")  # arrow up: the question is still known
        assert "not kept" not in before
        terminal.end()


def test_counts_that_are_not_asked_for_are_not_shown(server: TritonServer, tmp_path: Path) -> None:
    unasked = [f"return_num_{kind}_tokens=false" for kind in ("output", "cached")]
    with chat(server, tmp_path / "history", "-p", unasked[0], "-p", unasked[1]) as terminal:
        question = "What is the capital of France?\r"
        before, behind = terminal.say(question, "Paris", r"(.*)first after \d+ ms(.*)\r\n")
        assert "0 tokens" not in before and "None" not in behind
        terminal.end()


def test_a_user_without_a_home(server: TritonServer) -> None:
    """Neither a variable nor a list of users names it."""
    without = "import pwd; pwd.getpwuid = {}.__getitem__; from minisgl_backend.cli import __main__"
    child = pexpect.spawn(
        sys.executable,
        ["-c", f"{without}; __main__.main()", "chat", "--url", url_of(server, "grpc")],
        encoding="utf-8",
        timeout=PATIENCE_S,
        env={
            name: value
            for name, value in os.environ.items()
            if name not in ("HOME", "XDG_STATE_HOME")
        },
    )
    child.expect(r"Error: this user has no home: say where by --history")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 2


def test_chat(server: TritonServer, tmp_path: Path) -> None:
    history, saved = tmp_path / "state" / "history", tmp_path / "chat.json"
    with chat(server, history, "--system", "Be brief.") as terminal:
        terminal.child.expect(r"minisgl at 127\.0\.0\.1:\d+\. /help lists commands")
        terminal.say("What is the capital of France?\r", "Paris", FIGURES)
        question = "The code of Anna is 4711.\x1b\rWhat is the code of Anna?\r"
        _, num_cached, _ = terminal.say(question, "4711", FIGURES)
        assert int(num_cached) > 0  # the conversation so far comes from the cache
        terminal.say("/help\r", "/params .*NAME=VALUE", "Ctrl-D +end")
        terminal.say(
            "/params seed=7 stop='[\"zz z\"]' top_k=3\r", r'stop = \["zz z"\]', "top_k = 3"
        )
        terminal.say("/params top_k= max_tokens=64\r", "max_tokens = 64", "seed = 7")
        terminal.say("/params top_k=much\r", "top_k: 'much' is not a valid value")
        terminal.say("/params 'top_k\r", "No closing quotation")
        terminal.say("/params num_logprobs=1\r", "only `minisgl generate --jsonl` shows")
        terminal.say("/system\r", r"system message: Be brief\.")
        terminal.say("/system Be kind.\r", r"system message: Be kind\.")
        terminal.say(f"/save {saved}\r", "4 messages in")
        terminal.say(f"/save {tmp_path}\r", "Is a directory")
        terminal.say(
            "/save ~no.such.user/chat\r", "~no.such.user/chat begins with the home of nobody"
        )
        terminal.say("/save\r", "/save needs a file")
        terminal.say("/nothing\r", "no command /nothing; /help lists them")
        terminal.say("/params tempreature=3\r", "tempreature = 3")
        terminal.say("hello\r", "INVALID_ARG: unknown parameter 'tempreature'; did you mean")
        terminal.say("/params tempreature= temperature=NaN\r", "temperature = NaN")
        terminal.say("hello\r", "INVALID_ARG: temperature must be finite, got nan")
        terminal.say("/params temperature=0.0\r", r"temperature = 0\.0")
        terminal.say("/system -\r", "system message: none")
        terminal.say("/reset\r", "forgotten")
        _, _, num_input = terminal.say("What is the emoji for a fox?\r", "🦊", FIGURES)
        assert int(num_input) < 25  # nothing of the previous conversation
        terminal.say("half a line\x03")
        terminal.end()
    content = json.loads(saved.read_text("utf-8"))
    assert content["system"] == "Be kind."
    assert content["parameters"] == {
        "max_tokens": 64,
        "temperature": 0.0,
        "seed": 7,
        "stop": ["zz z"],
    }
    assert [turn["role"] for turn in content["messages"]] == ["user", "assistant"] * 2
    assert content["messages"][2]["content"] == (
        "The code of Anna is 4711.\nWhat is the code of Anna?"
    )
    assert "What is the capital of France?" in history.read_text("utf-8")
    assert history.stat().st_mode & 0o777 == 0o600
    with chat(server, history) as terminal:
        terminal.say("\x1b[A\r", "🦊", FIGURES)  # arrow up: the last question of the session before
        terminal.end("/quit\r")


def test_another_name_of_max_tokens_takes_its_place(server: TritonServer, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    asked = {"max_tokens": 3, "fit_max_tokens": False}
    with chat(server, tmp_path / "history") as terminal:
        terminal.say(
            f"/params sampling_parameters='{json.dumps(asked)}'\r", "sampling_parameters = "
        )
        terminal.say("Count.\r", "length · 3 tokens")
        terminal.say("/params sampling_parameters= max_new_tokens=2\r", "max_new_tokens = 2")
        terminal.say("Count.\r", "length · 2 tokens")
        terminal.say("/params max_tokens=1\r", "max_tokens = 1")
        terminal.say("Count.\r", "length · 1 tokens")
        terminal.say(f"/save {saved}\r", "6 messages in")
        terminal.end()
    assert json.loads(saved.read_text("utf-8"))["parameters"] == {"temperature": 0, "max_tokens": 1}


def test_half_a_character_does_not_spoil_what_was_saved(
    server: TritonServer, tmp_path: Path
) -> None:
    """JSON may hold half of a surrogate pair."""
    saved = tmp_path / "chat.json"
    with chat(server, tmp_path / "history") as terminal:
        terminal.say("/params stop='[\"\\ud800\"]'\r", "stop = ")
        terminal.say(f"/save {saved}\r", "0 messages in")
        terminal.say("hello\r", "INVALID_ARG: .*must be valid UTF-8")
        terminal.end()
    assert json.loads(saved.read_text("utf-8"))["parameters"]["stop"] == ["\ud800"]


def test_lines_of_an_answer_stay_lines(server: TritonServer, tmp_path: Path) -> None:
    with chat(server, tmp_path / "history") as terminal:
        terminal.say("Write a poem about the sea.\r", FIGURES)
        lines = (terminal.child.before or "").split("\r\n")
        assert any("🌙 🌊 ⭐ 🌊 🌙" in line and "🐙" not in line for line in lines)
        terminal.end()


def test_a_terminal_that_lacks_characters(
    server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with chat(server, tmp_path / "history") as terminal:
        terminal.say("How do you say cat in Japanese?\r", r"\?", FIGURES.replace("·", r"\?"))
        terminal.end()


def test_interrupting_an_answer(paced_server: TritonServer, tmp_path: Path) -> None:
    """Ctrl-C stops the answer, frees the engine, and leaves the shell as it was."""
    engine = Engine(paced_server)
    saved = tmp_path / "chat.json"
    with chat(paced_server, tmp_path / "history", "--max-tokens", "4000") as terminal:
        terminal.say("Go on for ever.\r", "The quick brown")
        terminal.child.sendintr()
        terminal.child.expect("stopped · " + FIGURES)
        engine.check_cancelled()
        terminal.say("/params max_tokens=2\r", "max_tokens = 2")
        terminal.say("And now?\r", "length · 2 tokens")
        terminal.say(f"/save {saved}\r", "4 messages in")
        terminal.end()
    assert json.loads(saved.read_text("utf-8"))["messages"][1]["content"]


def test_interrupting_before_an_answer(paced_server: TritonServer, tmp_path: Path) -> None:
    """A question that waits behind others disappears without a trace."""
    engine = Engine(paced_server)
    endless: dict[str, Any] = {"input_ids": [1, 2, 3], "max_tokens": 16000, "stream": True}
    with chat(paced_server, tmp_path / "history") as terminal:
        with Call(paced_server, **endless) as first, Call(paced_server, **endless) as second:
            assert first.next() and second.next()
            terminal.say("Is it my turn?\r", "⠋")
            wait_for(
                lambda: Metrics(paced_server)["vllm:num_requests_waiting"] == 1, "a waiting request"
            )
            terminal.child.sendintr()
            terminal.child.expect(r"stopped(\x1b\[0m)?\r\n")
        engine.check_cancelled(3)
        terminal.say(f"/save {tmp_path / 'chat.json'}\r", "0 messages in")
        terminal.end()


def test_chat_needs_a_terminal_and_a_server() -> None:
    done = run("chat")
    assert done.returncode == 2
    assert "chat needs a terminal; `minisgl generate` does not" in done.stderr
    terminal = pexpect.spawn(
        MINISGL[0], [*MINISGL[1:], "chat", "--url", "127.0.0.1:1"], encoding="utf-8", timeout=60
    )
    terminal.expect("Error: no server with the model minisgl at 127.0.0.1:1")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 1
