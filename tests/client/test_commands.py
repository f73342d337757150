"""`minisgl generate` and `minisgl chat`, as people run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest

from minisgl_backend.server.process import TritonServer
from tests.client.engine import Engine
from tests.client.ways import url_of
from tests.server.client import PATIENCE_S, Metrics, generate, wait_for

pytestmark = pytest.mark.server

MINISGL = [sys.executable, "-c", "from minisgl_backend.cli.main import main; main()"]
POEM = "Write a poem about the sea."
GREEDY = ["--temperature", "0"]


def run(*words: str, stdin: str | bytes = "") -> subprocess.CompletedProcess[str]:
    """A command, with something on its standard input."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run([*MINISGL, *words], input=data, capture_output=True, timeout=120)
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


@pytest.fixture(params=["grpc", "http"])
def ask(server: TritonServer, request: pytest.FixtureRequest) -> list[str]:
    """`generate` with the server's address."""
    return ["generate", "--url", url_of(server, request.param), *GREEDY]


def test_a_prompt_however_it_is_given(server: TritonServer, ask: list[str], tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "content": POEM}])
    said = generate(server, messages=messages, temperature=0.0, max_tokens=256)["text_output"]
    assert "\n" in said
    file = tmp_path / "prompt.txt"
    file.write_text(POEM + "\n", "utf-8")
    for words, stdin in [([POEM], ""), (["-f", str(file)], ""), ([], POEM), (["-f", "-"], POEM)]:
        done = run(*ask, "--chat", *words, stdin=stdin)
        assert (done.returncode, done.stdout, done.stderr) == (0, said + "\n", "")


def test_parameters_of_a_command(ask: list[str]) -> None:
    assert run(*ask, "The capital of France is", "--stop", "x", "--stop", "ar").stdout == " P\n"
    many = ["-p", "stop_token_ids=[5]", "-p", "cache_salt=7", "-p", "min_tokens=2", "-p", "n=1"]
    done = run(*ask, "a", "--max-tokens", "2", "--seed", "5", "--top-k", "3", *many)
    assert (done.returncode, done.stderr) == (0, "")
    system = run(*ask, "--system", "You are a parrot.", "Who are you?")
    assert system.returncode == 0 and system.stdout.strip()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["x", "--max-tokens", "0"], 1, "Error: INVALID_ARG: max_tokens must be >= 1, got 0"),
        (["x", "-p", "n=2"], 1, "Error: UNSUPPORTED: n is not supported, got 2"),
        (["x", "-p", "top_k"], 2, "'top_k' is not NAME=VALUE"),
        (["x", "-p", "top_k=much"], 2, "top_k: 'much' is no value for it"),
        (["x", "--jsonl"], 2, "give a prompt, or a file or standard input"),
        (["x", "--url", "127.0.0.1:1"], 1, "Error: CONNECTION_FAILED: failed to connect"),
        (["x", "--url", "ftp://here"], 1, "Error: INVALID_ARG: ftp://here is no address for grpc"),
    ],
)
def test_what_goes_wrong(server: TritonServer, words: list[str], code: int, message: str) -> None:
    done = run("generate", "--url", url_of(server, "grpc"), *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


LINES: list[tuple[str, dict[str, Any]]] = [
    ('"What is the capital of France?"', {"text": "Paris", "finish_reason": "stop"}),
    ('{"prompt": "What is 7 plus 8?", "id": 7}', {"id": 7, "text": "15"}),
    ('{"prompt": "What is 7 plus 8?", "max_tokens": 1}', {"finish_reason": "length"}),
    ('{"id": "ids", "input_ids": [5, 6], "max_tokens": 2}', {"id": "ids", "num_input_tokens": 2}),
    (
        '{"messages": [{"role": "user", "content": "How do you say cat in Japanese?"}]}',
        {"text": "猫"},
    ),
    ('{"prompt": "x", "top_q": 1}', {"error": "INVALID_ARG: unknown parameter 'top_q'; did you"}),
    ('{"prompt": "x", "n": 2, "id": 0}', {"id": 0, "error": "UNSUPPORTED: n is not supported"}),
    ('{"prompt": 5}', {"error": "INVALID_ARG: text_input must be a string, got 5"}),
    ('{"prompt": "x", "self": 5}', {"error": "INVALID_ARG: unknown parameter 'self'"}),
    ("[]", {"error": "INVALID_ARG: a line must be a JSON string or an object"}),
    ("prose", {"error": "INVALID_ARG: the line is not JSON: "}),
    ('"\\ud83d"', {"error": "INVALID_ARG: messages must be valid UTF-8"}),
]


def check_line(told: dict[str, Any], expected: dict[str, Any]) -> None:
    if "error" in told:
        told["error"] = f"{told['error']['code']}: {told['error']['message']}"
    assert told.keys() >= expected.keys()
    for name, value in expected.items():
        assert told[name] == value or (name == "error" and told[name].startswith(value)), told


@pytest.mark.parametrize("concurrency", ["1", "5"])
def test_lines(ask: list[str], tmp_path: Path, concurrency: str) -> None:
    """Each line gives one, in order, whatever becomes of it; blank lines give none."""
    file = tmp_path / "requests.jsonl"
    file.write_text("\n\n".join(line for line, _ in LINES), "utf-8")
    done = run(*ask, "--chat", "--jsonl", "-f", str(file), "--concurrency", concurrency)
    assert (done.returncode, done.stderr) == (1, "")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for told, (_, expected) in zip(answers, LINES, strict=True):
        check_line(told, expected)


def test_lines_that_are_all_good(server: TritonServer) -> None:
    lines = [
        {"prompt": "a", "id": n, "max_tokens": 1 + n % 3, "num_logprobs": 1, "ignore_eos": True}
        for n in range(70)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = run("generate", "--url", url_of(server, "grpc"), "--jsonl", stdin=text)
    assert (done.returncode, done.stderr) == (0, "")
    for line, told in zip(lines, map(json.loads, done.stdout.splitlines()), strict=True):
        assert told["id"] == line["id"]
        assert told["num_output_tokens"] == line["max_tokens"] == len(told["logprobs"])
        assert told["logprobs"][0]["chosen"].keys() == {"token_id", "text", "logprob", "rank"}


def test_answers_do_not_wait_for_the_next_line(server: TritonServer) -> None:
    words = ["generate", "--url", url_of(server, "grpc"), "--jsonl", *GREEDY]
    with subprocess.Popen(
        [*MINISGL, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        for _ in range(2):
            process.stdin.write('"What is the capital of France?"\n')
            process.stdin.flush()
            assert "Paris" in json.loads(process.stdout.readline())["text"]
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("jsonl", [False, True])
def test_interrupted(paced_server: TritonServer, jsonl: bool) -> None:
    """Ctrl-C cancels what is under way, also while more input may come."""
    engine = Engine(paced_server)
    words = ["generate", "--url", url_of(paced_server, "grpc"), "--max-tokens", "4000"]
    with subprocess.Popen(
        [*MINISGL, *words, *(["--jsonl"] if jsonl else ["a"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stderr
        if jsonl:
            process.stdin.write(b'"a"\n"b"\n')
            process.stdin.flush()
        num_running = 2 if jsonl else 1
        wait_for(
            lambda: Metrics(paced_server)["vllm:num_requests_running"] == num_running, "requests"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b""
    engine.check_cancelled(num_running)


def test_progress_on_a_terminal(server: TritonServer, tmp_path: Path) -> None:
    """The bar is drawn where people see it, and answers go where they belong."""
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text('{"prompt": "a", "max_tokens": 2, "ignore_eos": true}\n' * 9, "utf-8")
    command = f'exec "$@" --jsonl -f {requests} > {answers}'
    words = ["sh", *MINISGL, "generate", "--url", url_of(server, "grpc")]
    terminal = pexpect.spawn("/bin/sh", ["-c", command, *words], encoding="utf-8", timeout=120)
    terminal.expect("9/9.*18 tokens")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    told = map(json.loads, answers.read_text("utf-8").splitlines())
    assert [line["num_output_tokens"] for line in told] == [2] * 9


class Terminal:
    """A chat in a terminal of 100 columns; ``say`` waits for the prompt first."""

    def __init__(self, server: TritonServer, history: Path, *words: str) -> None:
        url = url_of(server, "grpc")
        self.child = pexpect.spawn(
            MINISGL[0],
            [*MINISGL[1:], "chat", "--url", url, "--history", str(history), *GREEDY, *words],
            encoding="utf-8",
            timeout=PATIENCE_S * 2,
            dimensions=(40, 100),
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"},
        )

    def say(self, line: str, *expected: str) -> tuple[str, ...]:
        """Type a line when the terminal is ready for it; see these patterns after it.

        The groups of the last pattern are what it returns.
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


def test_chat(server: TritonServer, tmp_path: Path) -> None:
    history, saved = tmp_path / "state" / "history", tmp_path / "chat.json"
    with chat(server, history, "--system", "Be brief.") as terminal:
        terminal.child.expect(r"minisgl at 127\.0\.0\.1:\d+\. /help lists commands")
        terminal.say("What is the capital of France?\r", "Paris", FIGURES)
        question = "The code of Anna is 4711.\x1b\rWhat is the code of Anna?\r"
        _, num_cached, _ = terminal.say(question, "4711", FIGURES)
        assert int(num_cached) > 0  # the conversation so far, from the cache
        terminal.say("/help\r", "/params .*NAME=VALUE", "Ctrl-D +end")
        terminal.say(
            "/params seed=7 stop='[\"zz z\"]' top_k=3\r", r'stop = \["zz z"\]', "top_k = 3"
        )
        terminal.say("/params top_k= max_tokens=64\r", "max_tokens = 64", "seed = 7")
        terminal.say("/params top_k=much\r", "top_k: 'much' is no value for it")
        terminal.say("/params 'top_k\r", "No closing quotation")
        terminal.say("/system\r", r"system message: Be brief\.")
        terminal.say("/system Be kind.\r", r"system message: Be kind\.")
        terminal.say(f"/save {saved}\r", "4 messages in")
        terminal.say(f"/save {tmp_path}\r", "Is a directory")
        terminal.say("/save\r", "/save needs a file")
        terminal.say("/nothing\r", "no command /nothing; /help lists them")
        terminal.say("/params tempreature=3\r", "tempreature = 3")
        terminal.say("hello\r", "INVALID_ARG: unknown parameter 'tempreature'; did you mean")
        terminal.say("/params tempreature=\r", "seed = 7")
        terminal.say("/system -\r", "system message: none")
        terminal.say("/reset\r", "forgotten")
        _, _, num_input = terminal.say("What is the emoji for a fox?\r", "🦊", FIGURES)
        assert int(num_input) < 25  # nothing of the conversation before
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
        terminal.say("\x1b[A\r", "🦊", FIGURES)  # arrow up: the last question of the day before
        terminal.end("/quit\r")


def test_lines_of_an_answer_stay_lines(server: TritonServer, tmp_path: Path) -> None:
    with chat(server, tmp_path / "history") as terminal:
        terminal.say(f"{POEM}\r", FIGURES)
        lines = (terminal.child.before or "").split("\r\n")
        assert any("🌙 🌊 ⭐ 🌊 🌙" in line and "🐙" not in line for line in lines)
        terminal.end()


def test_interrupting_an_answer(paced_server: TritonServer, tmp_path: Path) -> None:
    """Ctrl-C stops the answer, frees the engine, and leaves the shell as it was."""
    engine = Engine(paced_server)
    saved = tmp_path / "chat.json"
    with chat(paced_server, tmp_path / "history", "--max-tokens", "4000") as terminal:
        terminal.say("Go on for ever.\r")
        wait_for(
            lambda: (
                Metrics(paced_server)["vllm:generation_tokens_total"] > 0
                and Metrics(paced_server)["vllm:num_requests_running"] == 1
            ),
            "an answer under way",
        )
        terminal.child.sendintr()
        terminal.child.expect("stopped · " + FIGURES)
        engine.check_cancelled()
        terminal.say("/params max_tokens=2\r", "max_tokens = 2")
        terminal.say("And now?\r", "length · 2 tokens")
        terminal.say(f"/save {saved}\r", "4 messages in")
        terminal.end()
    assert json.loads(saved.read_text("utf-8"))["messages"][1]["content"]


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
