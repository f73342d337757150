"""What Ctrl-C does to the command `minisgl` while it starts, and what other signals do to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""The exit code, as shells have it."""
_OTHERS: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once, and quietly, while the block runs.

    For imports: in the middle of them ``KeyboardInterrupt`` becomes another error in an extension
    module, or gets lost in a callback.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """SIGTERM and SIGHUP do once what Ctrl-C does while the block runs, and give its exit code.

    So a command cleans up, whatever ends it. A command that has handlers of its own keeps them, and
    a signal that is to be ignored, as under nohup, still is.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if came:  # what is being cleaned up must not be left half-way
            return
        came.append(number)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # Ctrl-C is ignored, as by what a shell runs in the background
            raise KeyboardInterrupt
        on_ctrl_c(number, frame)

    taken = [one for one in _OTHERS if signal.getsignal(one) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
        if came:
            raise SystemExit(128 + came[0])
