"""Facts about an engine that does not exist."""

from __future__ import annotations

from typing import Any, Final

from minisgl_backend.runtime.engine_base import EngineInfo

_FACTS: Final[dict[str, Any]] = {
    "model": "fake",
    "folder": "",
    "architecture": "Fake",
    "device": "cpu",
    "dtype": "float32",
    "weights": "plain",
    "attention_backend": "sdpa",
    "vocab_size": 100,
    "eos_token_ids": (),
    "max_sequence_length": 200,
    "page_size": 16,
    "num_pages": 50,
    "max_running_requests": 2,
    "max_queued_requests": 9,
    "max_queued_tokens": 1000,
}


def engine_info(**changes: Any) -> EngineInfo:
    """The facts about a small engine, some of them changed."""
    return EngineInfo(**{**_FACTS, **changes})
