"""Starts servers until one is ready, as the supervisor does.

Triton 24.10 aborts in its start with ``boost::interprocess::lock_exception`` if the process of a
model gets no processor for about a second: it gives the process up, and then uses locks that it has
freed. It may also hang when it forks. On a busy machine this happens several times in a row, so
each further start waits twice as long as the one before. Must not know what a server is for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from minisgl_backend.server.process import START_S, BrokenStart, TritonServer

_MOST_AGAIN: Final = 4


def ready(
    start: Callable[[], TritonServer], *, within_s: float = START_S, first_pause_s: float = 1.0
) -> TritonServer:
    """A server that is ready; ``start`` starts one without waiting for it.

    Raises ``BrokenStart`` if the last start crashes or hangs, too, and ``ConfigError`` at once if
    one fails for another reason. The servers that do not become ready are killed.
    """
    for num_broken in range(_MOST_AGAIN):
        with suppress(BrokenStart):
            return _waited_for(start(), within_s)
        time.sleep(first_pause_s * 2**num_broken)
    return _waited_for(start(), within_s)


def _waited_for(server: TritonServer, within_s: float) -> TritonServer:
    try:
        server.wait_ready(within_s)
    except BaseException:
        server.kill()
        raise
    return server
