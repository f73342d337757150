"""What is done once at the start to see that it fits the device, beside the pages of the cache.

Knows how much memory is free. Must not know what takes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from minisgl_backend.device.base import Device
from minisgl_backend.errors import ConfigError


@contextmanager
def must_fit(device: Device, what: str, *, options: str) -> Iterator[None]:
    """Raise ``ConfigError`` if the block runs out of the device's memory. It says that ``what``
    does not fit, and that one of the ``options`` must be lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{what} does not fit beside the KV pages, with "
            f"{device.free_memory() / 2**30:.1f} GiB free: lower {options}"
        ) from error
