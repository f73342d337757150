"""`minisgl generate`, as people and pipes run it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pexpect
import pytest
from click.testing import CliRunner
from minisgl_client import Client

from minisgl_backend.cli.main import main
from minisgl_backend.server.process import TritonServer
from tests.client.commands import GREEDY, MINISGL, run
from tests.client.engine import Engine
from tests.client.test_retries import GOOD, Script, grpc_server
from tests.client.ways import url_of
from tests.server.client import PATIENCE_S, Metrics, generate, wait_for

pytestmark = pytest.mark.server

POEM = "Write a poem about the sea."


@pytest.fixture
def ask(server: TritonServer, request: pytest.FixtureRequest) -> list[str]:
    """`generate` with the server's address, by default for gRPC: `test_answers` sends every
    parameter both ways."""
    return ["generate", "--url", url_of(server, getattr(request, "param", "grpc")), *GREEDY]


@pytest.mark.parametrize("ask", ["grpc", "http"], indirect=True)
def test_a_prompt_however_it_is_given(server: TritonServer, ask: list[str], tmp_path: Path) -> None:
    messages = json.dumps([{"role": "user", "content": POEM}])
    said = generate(server, messages=messages, temperature=0.0, max_tokens=256)["text_output"]
    assert "\n" in said
    file = tmp_path / "prompt.txt"
    file.write_text(POEM + "\n", "utf-8")
    for words, stdin in [([POEM], ""), (["-f", str(file)], ""), ([], POEM), (["-f", "-"], POEM)]:
        done = run(*ask, "--chat", *words, stdin=stdin)
        assert (done.returncode, done.stdout, done.stderr) == (0, said + "\n", "")


@pytest.mark.parametrize("name", ["best_of", "sampling_parameters"])
def test_the_best_of_several_answers(ask: list[str], name: str) -> None:
    given = 3 if name == "best_of" else json.dumps({"best_of": 3})
    done = run(*ask, "The capital of France is", "--stop", "ar", "-p", f"{name}={given}")
    assert (done.returncode, done.stdout, done.stderr) == (0, " P\n", "")


def test_parameters_of_a_command(ask: list[str]) -> None:
    assert run(*ask, "The capital of France is", "--stop", "x", "--stop", "ar").stdout == " P\n"
    whole = run(*ask, "The capital of France is", "-p", "exclude_input_in_output=false")
    assert (whole.stdout, whole.stderr) == ("The capital of France is Paris\n", "")
    many = ["-p", "stop_token_ids=[5]", "-p", "cache_salt=7", "-p", "min_tokens=2", "-p", "n=1"]
    done = run(*ask, "a", "--max-tokens", "2", "--seed", "5", "--top-k", "3", *many)
    assert (done.returncode, done.stderr) == (0, "")
    system = run(*ask, "--system", "You are a parrot.", "Who are you?")
    assert system.returncode == 0 and system.stdout.strip()


def test_an_embedding_is_a_line_of_json(server: TritonServer, ask: list[str]) -> None:
    with Client(url_of(server, "grpc")) as client:
        expected = pytest.approx(client.generate(POEM, embed=True).embedding, abs=1e-5)
    for words in ([], ["--max-tokens", "0"], ["-p", "max_tokens=0"]):
        done = run(*ask, POEM, "-p", "embed=true", *words)
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        assert json.loads(done.stdout) == expected
    refused = run(*ask, POEM, "-p", "embed=true", "--max-tokens", "5")
    assert "max_tokens must be 0 with embed, got 5" in refused.stderr
    lines = f'{{"prompt": "{POEM}", "embed": true}}\n"{POEM}"\n'
    told, generated = map(json.loads, run(*ask, "--jsonl", stdin=lines).stdout.splitlines())
    assert told["embedding"] == expected
    assert generated["num_output_tokens"] > 0


def test_the_other_name_of_max_tokens_replaces_the_default(ask: list[str]) -> None:
    done = run(*ask, POEM, "-p", "max_new_tokens=3", "-p", "ignore_eos=true")
    assert (done.returncode, done.stderr) == (0, "")
    lines = '{"prompt": "a", "max_new_tokens": 3}\n{"prompt": "a", "max_tokens": 2}\n"a"\n'
    words = ["--jsonl", "-p", "max_new_tokens=4", "-p", "ignore_eos=true"]
    told = map(json.loads, run(*ask, *words, stdin=lines).stdout.splitlines())
    assert [answer.get("num_output_tokens") for answer in told] == [3, 2, 4]


@pytest.mark.parametrize("name", ["max_tokens", "max_new_tokens"])
def test_max_tokens_in_sampling_parameters_replaces_the_default(ask: list[str], name: str) -> None:
    inner = json.dumps({name: 3, "ignore_eos": True})
    words = ["--jsonl", "-p", f"sampling_parameters={inner}"]
    line = {"prompt": "a", "sampling_parameters": json.dumps({name: 2, "ignore_eos": True})}
    told = run(*ask, *words, stdin=f'"a"\n{json.dumps(line)}\n')
    assert [json.loads(answer).get("num_output_tokens") for answer in told.stdout.splitlines()] == [
        3,
        2,
    ]


CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "日本"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_the_form_of_an_answer(ask: list[str], tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.gbnf"
    schema.write_text(json.dumps(CITY), "utf-8")
    grammar.write_text('root ::= [0-9] (", " [0-9])*', "utf-8")
    done = run(*ask, "The capital of France is", "--json-schema", str(schema))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["city"] in ("Paris", "日本")
    assert run(*ask, "The capital of France is", "--regex", "P[a-z]+s").stdout == "Paris\n"
    choices = ["--choice", "Rome", "--choice", "Paris"]
    assert run(*ask, "--chat", "What is the capital of France?", *choices).stdout == "Paris\n"
    counted = run(*ask, "--chat", "Count from 1 to 5.", "--grammar", str(grammar))
    assert counted.stdout == "1, 2, 3, 4, 5\n"
    lines = '"What is 7 plus 8?"\n{"prompt": "x", "structured_outputs": {"choice": ["y"]}}\n'
    done = run(*ask, "--jsonl", "--chat", "--regex", "[0-9]{2}", stdin=lines)
    assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["15", "y"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json-schema", "none.json"], "File 'none.json' does not exist"),
        (["--json-schema", "."], "File '.' is a directory"),
        (["--json-schema", "text"], "text is not JSON: Expecting value"),
        (["--json-schema", "twice"], "twice: the key 'type' is given twice"),
        (["--json-schema", "deep"], "deep is not JSON"),
        (["--json-schema", "list"], "list is no JSON schema, which is an object, true or false"),
        (["--json-schema", "latin"], "latin must be valid UTF-8"),
        (["--grammar", "latin"], "latin must be valid UTF-8"),
        (["--grammar", "/proc/self/mem"], "/proc/self/mem cannot be read: Input/output error"),
        (["--regex", "a", "--choice", "b"], "give one of --regex and --choice"),
        (
            ["--regex", "a", "-p", 'structured_outputs={"regex": "b"}'],
            "--param structured_outputs stands beside --regex",
        ),
    ],
)
def test_forms_that_are_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """Nothing is sent: there is no server."""
    monkeypatch.chdir(tmp_path)
    texts = {"text": "no JSON", "twice": '{"type": "a", "type": "b"}', "list": "[]"}
    for name, text in {**texts, "deep": "[" * 100_000}.items():
        Path(name).write_text(text, "utf-8")
    Path("latin").write_bytes(b"\xe9")
    done = CliRunner().invoke(main, ["generate", "--url", "127.0.0.1:1", "x", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert isinstance(done.exception, SystemExit) and message in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["x", "--regex", "("], 1, "Error: INVALID_ARG: regex: "),
        (
            ["x", "--max-tokens", "0"],
            1,
            "Error: INVALID_ARG: max_tokens must be >= 1 without num_prompt_logprobs or embed, "
            "got 0",
        ),
        (["x", "-p", "n=2", "-n", "3"], 2, "Error: -n and --param n have different values"),
        (["x", "-n", "65"], 1, "Error: INVALID_ARG: n must be in 1 .. 64, got 65"),
        (["x", "-p", "suffix=y"], 1, "Error: UNSUPPORTED: suffix is not supported, got 'y'"),
        (["x", "-p", "top_k"], 2, "'top_k' is not NAME=VALUE"),
        (["x", "-p", "top_k=much"], 2, "top_k: 'much' is not a valid value"),
        (["x", "-p", f"top_k={'[' * 9000}"], 2, "top_k: '[[[[[[["),
        (["x", "--jsonl"], 2, "give a prompt, or a file or standard input"),
        (["x", "--concurrency", "2"], 2, "--concurrency needs --jsonl"),
        (
            ["x", "-p", "num_logprobs=0"],
            2,
            "--param num_logprobs: only `minisgl generate --jsonl` shows",
        ),
        (
            ["x", "-p", "return_log_probs=true"],
            2,
            "--param return_log_probs: only `minisgl generate --jsonl` shows",
        ),
        (["x", "--url", "127.0.0.1:1"], 1, "Error: CONNECTION_FAILED: failed to connect"),
        (["x", "-p", "prompt=y"], 2, "prompt is not a parameter"),
        (["x", "-p", "self=y"], 1, "Error: INVALID_ARG: unknown parameter 'self'"),
        (["x", "--timeout-s", "nan"], 2, "Error: timeout_s must be finite and > 0, got nan"),
        (["--jsonl", "--timeout-s", "0"], 2, "Error: timeout_s must be finite and > 0, got 0"),
        (["-f", "/proc/self/mem"], 1, "Error: [Errno 5] Input/output error"),
        (["x", "--url", "ftp://here"], 2, "Error: ftp://here is not an address for grpc"),
    ],
)
def test_errors_and_exit_codes(
    server: TritonServer, words: list[str], code: int, message: str
) -> None:
    done = run("generate", "--url", url_of(server, "grpc"), *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_prompt_that_is_not_utf_8() -> None:
    done = run("generate", stdin=b"caf\xe9")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: INVALID_ARG: the prompt must be valid UTF-8: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("jsonl", [False, True])
def test_an_output_that_takes_nothing(server: TritonServer, jsonl: bool) -> None:
    """A full disk is reported; a reader that has left is not told."""
    command = [*MINISGL, "generate", "--url", url_of(server, "grpc"), "--max-tokens", "2"]
    command += ["--jsonl"] if jsonl else []
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, input=b'"a"\n', stdout=full, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1, b"Error: [Errno 28] No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, input=b'"a"\n', stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("jsonl", [[], ["--jsonl"]])
@pytest.mark.parametrize(("redirection", "name"), [(">&-", "output"), ("<&-", "input")])
def test_a_closed_standard_stream_is_named(jsonl: list[str], redirection: str, name: str) -> None:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *MINISGL, "generate", *jsonl]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: standard {name} is closed\n"


def test_control_characters_stay_away_from_terminals(server: TritonServer) -> None:
    """Pipes get them: they are the answer."""
    words = ["generate", "--url", url_of(server, "grpc"), *GREEDY, "x", "--max-tokens", "2"]
    words += ["-p", 'logit_bias={"198": 100}']
    assert run(*words).stdout == "\x07\x07\n"
    terminal = pexpect.spawn(MINISGL[0], [*MINISGL[1:], *words], encoding="utf-8", timeout=120)
    terminal.expect(pexpect.EOF)
    assert terminal.before == "\r\n"
    terminal.close()
    assert terminal.exitstatus == 0


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
    ('{"prompt": "x", "echo": true, "id": 0}', {"id": 0, "error": "UNSUPPORTED: echo is not"}),
    ('{"prompt": 5}', {"error": "INVALID_ARG: text_input must be a string, got 5"}),
    ('{"prompt": "x", "self": 5}', {"error": "INVALID_ARG: unknown parameter 'self'"}),
    ("[]", {"error": "INVALID_ARG: a line must be a JSON string or an object"}),
    ("[" * 200_000, {"error": "INVALID_ARG: the line is not JSON: "}),
    ('{"prompt": "x", "prompt": "y"}', {"error": "INVALID_ARG: the key 'prompt' is given twice"}),
    ('{"prompt": "x", "request_id": "a"}', {"error": "INVALID_ARG: unknown parameter 'request_id"}),
    ('{"prompt": "x", "text_input": "y"}', {"error": "INVALID_ARG: text_input is not a parameter"}),
    ('{"prompt": "x", "id": "\\ud83d"}', {"id": "\ud83d", "error": "INVALID_ARG: request_id must"}),
    ('{"prompt": "x", "\\ud83d": 1}', {"error": r"INVALID_ARG: the name '\ud83d' must be valid"}),
    ('{"prompt": "x", "y\\u0000": 1}', {"error": r"INVALID_ARG: unknown parameter 'y\x00'"}),
    ('{"prompt": "x", "y": "\\ud83d"}', {"error": "INVALID_ARG: y must be valid UTF-8"}),
    ('{"prompt": "x", "y": 9223372036854775808}', {"error": "INVALID_ARG: y must be an integer"}),
    ("prose", {"error": "INVALID_ARG: the line is not JSON: "}),
    ('"\\ud83d"', {"error": "INVALID_ARG: messages must be valid UTF-8"}),
    ('"\0x\0"', {"error": "INVALID_ARG: the line is not JSON: Invalid control character"}),
]


def check_line(told: dict[str, Any], expected: dict[str, Any]) -> None:
    if "error" in told:
        told["error"] = f"{told['error']['code']}: {told['error']['message']}"
    assert told.keys() >= expected.keys()
    for name, value in expected.items():
        assert told[name] == value or (name == "error" and told[name].startswith(value)), told


@pytest.mark.parametrize("concurrency", ["1", "5"])
def test_lines(ask: list[str], tmp_path: Path, concurrency: str) -> None:
    """Each line gives one line, in order, whatever happens to it; blank lines give none."""
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
        chosen = told["logprobs"][0]["chosen"]
        assert chosen.keys() == {"token_id", "text", "logprob", "rank", "utf8"}
        assert bytes(chosen["utf8"]).decode(errors="replace") == chosen["text"]


def test_an_id_of_null_is_left_out() -> None:
    script = Script([GOOD])
    lines = '{"prompt": "x", "id": null}\n{"prompt": "x", "id": 0}\n'
    with grpc_server(script) as url:
        done = run("generate", "--url", url, "--jsonl", "--concurrency", "1", stdin=lines)
    assert (done.returncode, script.ids) == (0, ["", "0"])
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [None, 0]


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


@pytest.mark.parametrize("num_lines", [0, 2, 200])
def test_interrupted(paced_server: TritonServer, num_lines: int) -> None:
    """Ctrl-C cancels what is in progress, even if more input may come or waits to be read."""
    engine = Engine(paced_server)
    words = ["generate", "--url", url_of(paced_server, "grpc"), "--max-tokens", "4000"]
    with subprocess.Popen(
        [*MINISGL, *words, *(["--jsonl", "--concurrency", "2"] if num_lines else ["a"])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stderr
        process.stdin.write(b'"a"\n' * num_lines)
        process.stdin.flush()
        num_running = 2 if num_lines else 1
        wait_for(
            lambda: Metrics(paced_server)["vllm:num_requests_running"] == num_running, "requests"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.stderr.read() == b""
    engine.check_cancelled(num_running)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stop", "a", "-p", "stop=c"], "--stop and --param stop have different values"),
        (["--max-tokens", "3", "-p", "max_tokens=4"], "--max-tokens and --param max_tokens have"),
        (["-p", "top_k=3", "-p", "top_k=4"], "top_k has two values"),
    ],
)
def test_a_parameter_of_two_values(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["generate", "x", "--url", "127.0.0.1:1", *words])
    assert result.exit_code == 2
    assert message in result.output


def test_a_parameter_that_is_said_twice_alike() -> None:
    """Or one that has a default: the command goes on to a server, which is not there."""
    words = ["--stop", "a", "-p", "stop=a", "-p", "max_tokens=4", "--top-k", "3", "-p", "top_k=3"]
    words += ["--ensemble", "minisgl", "-p", "model=x"]
    result = CliRunner().invoke(main, ["generate", "x", "--url", "127.0.0.1:1", *words])
    assert result.exit_code == 1
    assert "Error: CONNECTION_FAILED" in result.output


@pytest.mark.parametrize("jsonl", [False, True])
def test_an_answer_that_a_deadline_cuts(paced_server: TritonServer, jsonl: bool) -> None:
    words = ["generate", "--url", url_of(paced_server, "grpc"), "--max-tokens", "8000"]
    for timeout_s in ("1", "10", "60"):
        bounded = [*words, "--timeout-s", timeout_s]
        done = run(*bounded, "--jsonl", stdin='"a"\n') if jsonl else run(*bounded, "a")
        assert done.returncode == 1
        if "TIMEOUT" not in done.stdout + done.stderr:
            break  # otherwise a busy machine had nothing in time
    if jsonl:
        assert json.loads(done.stdout)["finish_reason"] == "timeout"
        assert done.stderr == ""
    else:
        assert len(done.stdout) > 1 and done.stdout.endswith("\n")
        assert done.stderr == "Error: the answer was cut: timeout\n"


@pytest.mark.parametrize("module", ["click.core", "numpy.exceptions"])
def test_interrupted_while_it_starts(module: str) -> None:
    """It prints nothing, whatever is being imported; here the importer reports how far it is. The
    server never answers, so the command does not end by itself."""
    python, *words = MINISGL
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [python, "-X", "importtime", *words, "generate", "x", "--url", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr
            imported = (line.rpartition("|")[2].strip() for line in process.stderr)
            assert module in imported
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
    assert process.returncode == 130
    assert all(line.startswith("import time: ") for line in rest.splitlines())


def test_progress_on_a_terminal(server: TritonServer, tmp_path: Path) -> None:
    """The bar is drawn where people see it, and the answers go where they belong."""
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


def test_a_prompt_that_leaves_room_for_few_tokens(server: TritonServer, tmp_path: Path) -> None:
    """The context is 8192 tokens, and --max-tokens is 256 by default."""
    text = "a " * 8150
    file = tmp_path / "prompt"
    file.write_text(text, "utf-8")
    command = ["generate", "--url", url_of(server, "grpc"), "--file", str(file), *GREEDY]
    done = run(*command, "-p", "ignore_eos=true")
    assert (done.returncode, done.stderr) == (0, "")
    with Client(url_of(server, "grpc")) as client:
        ids = client.tokenize(text).ids[:8150]  # the same again, so that they are cached
    lines: list[dict[str, Any]] = [{"input_ids": ids, "ignore_eos": True} for _ in range(2)]
    lines[1]["max_tokens"] = 256
    words = ["generate", "--url", url_of(server, "grpc"), "--jsonl", *GREEDY]
    done = run(*words, stdin="\n".join(map(json.dumps, lines)))
    fitting, refused = map(json.loads, done.stdout.splitlines())
    assert fitting["num_output_tokens"] == 42
    assert refused["error"]["code"] == "INVALID_ARG"
