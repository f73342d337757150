"""What `minisgl chat` refuses before it asks a server or starts one."""

from __future__ import annotations

import pexpect
import pytest
from click import ClickException
from minisgl_client.cli.own_server import OwnServer

from tests.client.commands import MINISGL
from tests.waiting import PATIENCE_S


def check_refusal(words: list[str], message: str, code: int) -> None:
    child = pexpect.spawn(
        MINISGL[0],
        [*MINISGL[1:], "chat", *words],
        encoding="utf-8",
        timeout=PATIENCE_S,
        dimensions=(40, 160),
    )
    child.expect(message)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == code


@pytest.mark.parametrize("place", [["--model", "/no/such/model"], ["--url", "127.0.0.1:9"]])
def test_a_history_that_cannot_be_kept(place: list[str]) -> None:
    words = [*place, "--history", "/dev/null/folder/history"]
    check_refusal(words, "Error: the history cannot be kept: .*Not a directory", 1)


def test_parameters_whose_results_are_not_shown() -> None:
    message = "Error: --param num_logprobs: only `minisgl generate --jsonl` shows logprobs"
    check_refusal(["--param", "num_logprobs=1"], message, 2)


def test_a_server_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is that taken for an error of the history."""
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(ClickException, match=r"no server can be started: .*No such file"):
        OwnServer("demo", [])
