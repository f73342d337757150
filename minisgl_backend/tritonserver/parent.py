"""Ends a model's process when tritonserver ends, whatever its interpreter is doing.

The backend's stub often holds the interpreter's lock while it waits for an answer of tritonserver,
such as to a new metric, or to what ``execute`` has done. If tritonserver dies then, no Python
thread of the process ever runs again, and the watch that the stub itself keeps hangs, too. So the
kernel has to kill the process: PR_SET_PDEATHSIG.

To the kernel, the parent of a process is the thread that started it, and once that thread has ended
the main thread. The thread of tritonserver that starts a stub waits until ``initialize`` has
returned, and ends soon after. So the signal is asked for while the model is loaded, then taken
back, and asked for again as soon as the main thread is the parent. Until then a thread of this
process checks that its parent still lives: for ever, if /proc does not tell or tritonserver keeps
the first thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from minisgl_backend.death_signal import asking_for, end_with, end_without

_LOOK_EVERY_S: Final = 0.05
_STUB: Final = "triton_python_backend_stub"
_PARENT_ARGUMENT: Final = 5
"""Which argument of the stub names the process that started it."""


def tritonserver_pid() -> int:
    """The process that started this one, even if it is gone by now and another is the parent."""
    words = Path("/proc/self/cmdline").read_text("utf-8", "replace").split("\0")
    return int(words[_PARENT_ARGUMENT]) if Path(words[0]).name == _STUB else os.getppid()


@contextlib.contextmanager
def ending_with(parent: int) -> Iterator[None]:
    """Load a model: from the block's begin on, this process is killed when its ``parent`` ends.

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
        time.sleep(_LOOK_EVERY_S)
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
