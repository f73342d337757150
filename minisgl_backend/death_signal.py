"""Ends a process when its parent ends, by the signal that prctl's PR_SET_PDEATHSIG asks for.

To the kernel, the parent of a process is the thread that started it, or the main thread once that
thread has ended. A request for the signal holds as long as the thread that made it lives, and
survives exec.

A model's process needs the kernel for this. The backend's stub often holds the GIL while it waits
for tritonserver, such as when a metric is created or ``execute`` returns. If tritonserver dies
then, no Python thread of the process ever runs again, and the stub's own check of its parent hangs,
too.

The thread of tritonserver that starts a stub waits until ``initialize`` has returned, and ends soon
after. So ``ending_with`` asks for the signal while the model is loaded, then withdraws the request,
and repeats it as soon as the main thread is the parent. Until then a thread of this process polls
whether its parent lives; it never stops if /proc does not tell or tritonserver keeps the first
thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_POLL_EVERY_S: Final = 0.05


def asking_for(number: int) -> Callable[[], None]:
    """A function that asks for this signal, 0 for none; it may be called between fork and exec."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: in a child the loader's locks may be held

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, number)

    return ask


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its ``parent`` ends, even while it is stopped."""
    asking_for(signal.SIGKILL)()
    end_without(parent)


def end_without(parent: int) -> None:
    """Kill this process unless it is a child of ``parent``: if it is not, ``parent`` has ended."""
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def ending_with(parent: int) -> Iterator[None]:
    """Load a model: from the start of the block, this process is killed when its ``parent`` ends.

    The thread of ``parent`` that started this process must stay until the block is left.
    """
    end_with(parent)
    try:
        yield
    finally:
        asking_for(0)()
        threading.Thread(target=_follow, args=(parent,), name="parent", daemon=True).start()


def _follow(parent: int) -> None:
    while not _is_child_of_main_thread(parent):
        end_without(parent)
        time.sleep(_POLL_EVERY_S)
    end_with(parent)
    threading.Event().wait()  # the kernel forgets what a thread asked for when that thread ends


def _is_child_of_main_thread(parent: int) -> bool:
    own = str(os.getpid())
    try:
        if os.readlink("/proc/self") != own:  # it shows another namespace, whose ids are others
            return False
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text("ascii")
    except OSError:
        return False
    return own in children.split()
