"""What Ctrl-C, SIGTERM and SIGHUP do to the command `minisgl`.

Knows signals and this process; must not know what commands do, nor how they clean up.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""The exit code, by the convention of shells."""
_OTHERS: Final = (signal.SIGTERM, signal.SIGHUP)
_CLEAN_UP_S: Final = 1.0
"""Time from a signal to the forced end of the process."""


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
    """While the block runs, SIGTERM and SIGHUP act once as Ctrl-C, with the signal's exit code.

    So a command cleans up, whatever ends it. A command that has handlers of its own keeps them, and
    a signal that was ignored, as under nohup, still is.
    """
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if came:  # do not interrupt the cleanup
            return
        came.append(number)
        on_ctrl_c = signal.getsignal(signal.SIGINT)
        if not callable(on_ctrl_c):  # Ctrl-C is ignored, as in a shell's background jobs
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


def end_in_time(
    takes_over: Callable[[int], bool] = lambda _number: False, *, clean_up_s: float = _CLEAN_UP_S
) -> None:
    """From now on a signal ends the process within ``clean_up_s``, whatever its threads do.

    For calls that may take minutes, such as a step of a large model on a CPU: Python runs no signal
    handler while the main thread is in one, and waits at exit for other threads that are. Cleanup
    that takes longer is cut off; child processes get SIGTERM.

    ``takes_over`` is called with the signal's number, on another thread: True leaves that signal to
    the command's own handler. Call this once, on the main thread.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)  # written to before any handler runs

    def wait() -> None:
        while True:
            (number,) = os.read(told, 1)
            if number in (signal.SIGINT, *_OTHERS) and not takes_over(number):
                break
        time.sleep(clean_up_s)
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
        os._exit(128 + number)

    threading.Thread(target=wait, name="end in time", daemon=True).start()


def _children() -> list[int]:
    """The processes that this one has started."""
    found: list[int] = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            found += map(int, children.read_text("ascii").split())
    return found
