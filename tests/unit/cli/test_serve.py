"""What `minisgl serve` says once it serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from minisgl_backend.cli.serve import suggestion
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.models.catalog import load_spec


def test_a_model_is_asked_for_what_it_makes() -> None:
    spec = load_spec(Path(DEMO_MODEL))
    asked = []
    for generates in (True, False):
        command = suggestion("http://127.0.0.1:1/generate", replace(spec, generates=generates))
        begin, _, body = command.partition(" -d ")
        assert begin == "curl -s http://127.0.0.1:1/generate"
        asked.append(json.loads(body.strip("'")))
    assert asked[0].keys() == {"messages", "max_tokens", "temperature"}
    assert asked[1] == {"text_input": "What is the capital of France?", "embed": True}
