"""Garbage collection in measured spans of this process. Must not know what is measured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Collections in the block do not look at objects that existed before it, as in engines that
    serve; the time for what the block itself makes counts."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
