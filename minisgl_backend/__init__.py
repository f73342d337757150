"""MiniSGL: an LLM engine that runs inside Triton Inference Server, or in process through ``LLM``.

Importing this package loads nothing else. ``LLM`` and ``Output`` are imported from ``offline`` on
first use, and bring torch with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minisgl_backend.offline.call import Output
    from minisgl_backend.offline.llm import LLM
else:
    _HOMES = {"LLM": "minisgl_backend.offline.llm", "Output": "minisgl_backend.offline.call"}

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


__all__ = ["LLM", "Output"]
