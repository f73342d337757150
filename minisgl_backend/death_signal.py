"""The signal that Linux sends to a process when its parent ends: PR_SET_PDEATHSIG.

To the kernel, the parent is the thread that started the process. A request for the signal holds as
long as the thread that made it lives, and survives exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


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
