"""Wrappers of Triton's objects, which pass on everything but the methods that a subclass overrides.

Must not know what subclasses change. Triton's own classes have no types.
"""

from __future__ import annotations

from typing import Any


class TritonWrapper:
    """One of Triton's requests or response senders."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)
