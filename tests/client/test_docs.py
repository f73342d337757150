"""The examples in docs/client.md and docs/structured_outputs.md are true."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl_backend.server.process import TritonServer
from tests.client.ways import url_of
from tests.docs.markdown import Page

pytestmark = pytest.mark.server

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("name", "least"), [("client.md", 15), ("structured_outputs.md", 3)])
def test_python(server: TritonServer, name: str, least: int) -> None:
    page = Page(DOCS / name)
    text = "".join(block.text for block in page.blocks if block.language == "pycon")
    examples = text.replace("localhost:8001", url_of(server, "grpc"))
    test = doctest.DocTestParser().get_doctest(examples, {}, name, None, 0)
    assert len(test.examples) >= least
    told: list[str] = []
    doctest.DocTestRunner().run(test, out=told.append, clear_globs=False)
    test.globs["client"].close()
    assert not told, "".join(told)


@pytest.mark.parametrize(("name", "number"), [("client.md", 5), ("structured_outputs.md", 2)])
def test_console(server: TritonServer, tmp_path: Path, name: str, number: int) -> None:
    """Each command prints what the page shows below it; what `cat` shows is the file it names."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MINISGL_URL": url_of(server, "grpc"),
    }
    calls = Page(DOCS / name).calls
    assert len(calls) == number
    for call in calls:
        if call.command.startswith("cat "):
            (tmp_path / call.command.split()[1]).write_text(call.output + "\n", "utf-8")
        command = call.command.replace("127.0.0.1:8000", f"127.0.0.1:{server.http_port}")
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == call.output, done.stderr
