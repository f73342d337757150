"""What `minisgl gateway` refuses before it listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from minisgl_client.errors import InvalidArgument
from minisgl_gateway import command
from minisgl_gateway.command import gateway, make_server
from minisgl_gateway.gateway_options import GatewayOptions

from minisgl_backend.server.process import TritonServer
from tests.gateway.conftest import gateway_of


def check_refused(result: Result, words: str) -> None:
    assert result.exit_code == 2, result.exception
    assert isinstance(result.exception, SystemExit)  # which is no traceback
    assert words in result.output
    assert "ready on" not in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout-s", "nan"], "--timeout-s"),
        (["--patience-s", "0"], "--patience-s"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s"),
        (["--max-requests", "0"], "--max-requests"),
        (["--max-body-bytes", "-1"], "--max-body-bytes"),
        (["--max-header-bytes", "1"], "'--max-header-bytes': 1 is not in the range x>=1024"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--port", "99999"], "--port"),
        (["--triton", ""], "--triton"),
        (["--triton", "foo://x"], "--triton"),
        (["--triton", "http://127.0.0.1:8000"], "not an address for grpc"),
        (["--api-key", ""], "holds no key"),
        (["--api-key", "good", "--api-key", " "], "holds no key"),
        (["--api-key", "\udcff"], "UTF-8"),
        (["--cors-origin", "chat.example.org"], "is not as https://chat.example.org"),
        (["--cors-origin", "https://chat.example.org/"], "is not as https://chat.example.org"),
        (["--tool-dialect", "xml"], "'xml' is not one of 'auto', 'hermes', 'qwen_xml', 'glm'"),
        (["--cors-origin", "*"], "'*' needs an API key"),
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--host", "::"], "needs an API key"),
        (["--host", "example.com"], "needs an API key"),
        (["--host", ""], "--host must not be empty"),
        (["--model", ""], "--model must not be empty"),
        (["--model-name", ""], "--model-name must not be empty"),
    ],
)
def test_options(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_API_KEYS", raising=False)
    result = CliRunner().invoke(gateway, ["--port", "0", *options])
    check_refused(result, words)


def test_a_proxy_drops_an_idle_connection_first() -> None:
    """Else it now and then sends a request into one that is being closed, and answers 502."""
    of_nginx_s = 60
    assert make_server(GatewayOptions()).config.timeout_keep_alive > of_nginx_s


@pytest.mark.server
@pytest.mark.parametrize(
    ("model", "status", "cause"),
    [
        ("minisgl_batched", 500, "internal error: "),
        ("nix", 503, "the engine does not have the model: Request for unknown model: 'nix' is not"),
    ],
)
def test_the_log_has_the_story_of_a_model_that_cannot_be_used(
    server: TritonServer, tmp_path: Path, model: str, status: int, cause: str
) -> None:
    log, triton = tmp_path / "log", f"127.0.0.1:{server.grpc_port}"
    with gateway_of(triton, log, "--model", model, "--model-name", "minisgl") as gateway:
        whole = gateway.chat("Hi")
        streamed = gateway.chat("Hi", stream=True)
    for answer in (whole, streamed):
        assert answer.status_code == status
        assert model not in answer.text
        request_id = answer.headers["X-Request-Id"]
        line = next(
            line for line in log.read_text().splitlines() if f"{request_id}: {cause}" in line
        )
        assert f"'{model}'" in line


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"# none yet\n\n", "holds no key"), (b"", "holds no key"), (b"k\xff\n", "cannot read")],
)
def test_files_without_keys(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "keys").write_bytes(data)
    result = CliRunner().invoke(gateway, ["--api-key-file", str(tmp_path / "keys")])
    check_refused(result, words)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "holds no key"),
        (" \n", "holds no key"),
        (",", "has a comma"),
        ("a,b", "has a comma"),
        ("a, b", "has a comma"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_variable_without_keys(value: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINISGL_API_KEYS", value)
    check_refused(CliRunner().invoke(gateway), words)


def test_where_keys_come_from_and_the_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[GatewayOptions] = []

    def make_server(options: GatewayOptions) -> None:
        found.append(options)
        raise InvalidArgument("enough")

    monkeypatch.setattr(command, "make_server", make_server)
    monkeypatch.setenv("MINISGL_API_KEYS", "b\nc")
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfd  # whose\r\n\r\n e\r\n")
    options = ["--api-key", "a", "--api-key-file", str(tmp_path / "keys")]
    for dialect in ("auto", "hermes"):
        CliRunner().invoke(gateway, [*options, "--tool-dialect", dialect])
    assert [one.api_keys for one in found] == [("a", "b", "c", "d", "e")] * 2
    assert [one.tool_dialect for one in found] == [None, "hermes"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(gateway, ["--port", port])
    check_refused(result, "cannot listen")


def test_a_host_that_can_have_no_address() -> None:
    result = CliRunner().invoke(gateway, ["--host", "a..b", "--api-key", "k", "--port", "0"])
    check_refused(result, "Error: cannot listen on a..b:0: no such name\n")


@pytest.mark.server
def test_a_stop_right_after_the_start(tmp_path: Path) -> None:
    """The gateway ends cleanly from the moment it says where it listens."""
    with gateway_of("127.0.0.1:1", tmp_path / "log"):
        pass
