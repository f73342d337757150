"""What `minisgl gateway` refuses before it listens."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from minisgl_gateway.command import gateway


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--timeout-s", "nan"], "--timeout-s"),
        (["--patience-s", "0"], "--patience-s"),
        (["--drain-timeout-s", "-1"], "--drain-timeout-s"),
        (["--max-requests", "0"], "--max-requests"),
        (["--max-body-bytes", "-1"], "--max-body-bytes"),
        (["--api-key-file", "/nowhere"], "--api-key-file"),
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--host", "::"], "needs an API key"),
        (["--host", "example.com"], "needs an API key"),
    ],
)
def test_options(options: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINISGL_API_KEYS", raising=False)
    result = CliRunner().invoke(gateway, ["--port", "0", *options])
    assert result.exit_code != 0
    assert words in result.output


def test_a_file_without_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n\n")
    result = CliRunner().invoke(gateway, ["--api-key-file", str(tmp_path / "keys")])
    assert result.exit_code == 1
    assert "holds no key" in result.output


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(gateway, ["--port", port])
    assert result.exit_code == 1
    assert "cannot listen" in result.output
