"""The numbers of streams given to `minisgl bench response-path` and `gateway`."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_bench import servers


@pytest.mark.parametrize("command", ["response-path", "gateway"])
@pytest.mark.parametrize(
    ("streams", "why"),
    [
        ("a", "'a' is no list of numbers"),
        ("1,2.5", "'1,2.5' is no list of numbers"),
        ("4,0", "'4,0' has a number that is not above 0"),
        ("", "must not be empty"),
    ],
)
def test_a_wrong_number_of_streams_starts_no_server(
    command: str, streams: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "TritonServer", None)
    result = CliRunner().invoke(main, ["bench", command, "--streams", streams])
    assert result.exit_code == 2
    assert f"Invalid value for '--streams': {why}" in result.output
