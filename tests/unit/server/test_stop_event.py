"""A server may be told to stop at any moment."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from minisgl_backend.server.stop_event import StopEvent

_SET_AT_EACH_LINE = """
import sys
from minisgl_backend.server.stop_event import StopEvent

def wait_and_set_at(number):
    event, lines = StopEvent(), 0

    def trace(frame, what, value):
        nonlocal lines
        lines += what == "line"
        if what == "line" and lines == number:
            event.set()
        return trace

    sys.settrace(trace)
    event.wait(0.01)
    event.is_set()
    sys.settrace(None)
    return lines

number = 1
while wait_and_set_at(number) >= number:
    number += 1
assert number > 5
"""


def test_it_is_set_by_the_thread_that_waits_as_a_signal_handler_does() -> None:
    """A handler may run between any two instructions; here it runs between any two lines."""
    subprocess.run([sys.executable, "-c", _SET_AT_EACH_LINE], check=True, timeout=60)


def test_it_wakes_up_all_who_wait_and_those_who_come_later() -> None:
    event = StopEvent()
    assert not event.wait(0) and not event.wait(0.01) and not event.is_set()
    seen: list[bool] = []
    waiting = [threading.Thread(target=lambda: seen.append(event.wait())) for _ in range(3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    assert not seen
    event.set()
    event.set()
    for thread in waiting:
        thread.join()
    assert seen == [True] * 3
    assert event.is_set() and event.wait() and event.wait(10)
