"""What interrupts a call of ``LLM``: Ctrl-C at every point and while it closes, and errors of the
submitter."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from minisgl_backend import LLM
from minisgl_backend.offline.call import Mailbox
from minisgl_backend.offline.submitter import CallQueue

_AT_EVERY_POINT = """
import concurrent.futures, sys, threading, time
from pathlib import Path
import minisgl_backend
from minisgl_backend import LLM

package = Path(minisgl_backend.__file__).parent
OURS = (
    str(package / "offline"),
    str(package / "runtime"),
    str(package / "replicas"),
    threading.__file__,
    str(Path(concurrent.futures.__file__).parent),
)
num_left = 0

def interrupt(frame, event, arg):
    # calls and returns are the points at which Python looks for signals
    global num_left
    if not frame.f_code.co_filename.startswith(OURS):
        return None
    num_left -= 1
    if not num_left:
        raise KeyboardInterrupt
    return interrupt

num_points = 0
with LLM(num_pages=512, **{options}) as llm:
    expected = llm.generate({prompts}, {{"max_tokens": 2, "temperature": 0}})
    while True:
        num_points += 1
        num_left = num_points
        sys.settrace(interrupt)
        try:
            outputs = llm.generate({prompts}, {{"max_tokens": 2, "temperature": 0}})
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        while llm.stats().num_open:
            time.sleep(0.001)
    assert [one.text for one in outputs] == [one.text for one in expected]
print(num_points > 100)
"""


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        pytest.param(["one"], {}, id="one prompt"),
        pytest.param(["one", "two"], {}, id="several, which other threads tokenize"),
        pytest.param(["one"], {"data_parallel_size": 2, "device": "cpu"}, id="replicas"),
    ],
)
def test_ctrl_c_at_any_point_ends_the_requests_alone(
    prompts: list[str], options: dict[str, object]
) -> None:
    """No lock is kept and no count is left behind; otherwise the next call would hang."""
    code = _AT_EVERY_POINT.format(prompts=prompts, options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_ctrl_c_while_it_closes_does_not_stop_the_end() -> None:
    """A call of ``close`` is interrupted in the middle of a step; the next waits for the end."""
    code = textwrap.dedent(
        """
        import os, signal, threading, time
        from minisgl_backend import LLM

        llm = LLM(num_pages=2048, max_prefill_tokens=8192)
        prompt = [5] * 8000
        thread = threading.Thread(target=lambda: next(llm.stream([prompt] * 2), None), daemon=True)
        thread.start()
        while not llm.stats().num_prompt_tokens:
            pass
        try:
            threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            llm.close()
            time.sleep(60)
        except KeyboardInterrupt:
            pass
        llm.close()
        print([thread.name for thread in threading.enumerate() if thread.name == "engine"])
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_ctrl_c_ends_a_script_and_its_requests(tmp_path: Path) -> None:
    """Without `if __name__ == "__main__"`; the engine is closed, and the exit code is Python's."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import threading
            from minisgl_backend import LLM

            with LLM(num_pages=512) as llm:
                def tell():
                    while not llm.stats().num_generated_tokens:
                        pass
                    print("begun", flush=True)

                threading.Thread(target=tell).start()
                try:
                    llm.generate("one", {"max_tokens": 8000, "ignore_eos": True})
                except KeyboardInterrupt:
                    while llm.stats().num_open:
                        pass
                    print(llm.stats().num_cancelled, "cancelled", flush=True)
                    raise
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "1 cancelled\n"
        assert process.stderr.read().rstrip().endswith("KeyboardInterrupt")
        assert process.wait(60) == -signal.SIGINT


def test_a_caller_does_not_wait_for_prompts_that_cannot_be_prepared(llm: LLM) -> None:
    """An error on the submitter's thread reaches the call, and the submitter continues."""
    told: SimpleQueue[Mailbox | Exception] = SimpleQueue()
    call = llm._call("one", {"max_tokens": 1}, stream=False)

    def prompts() -> Iterator[Mailbox]:
        yield Mailbox(0, call._prepared[0], call._vocabulary, told, llm._submitter)
        raise ValueError("no second one")

    llm._submitter.submit(CallQueue(prompts(), on_failed=told.put))
    assert str(told.get(timeout=60)) == "no second one"
    assert len(llm.generate("one", {"max_tokens": 1})) == 1


def test_a_caller_does_not_wait_for_threads_that_cannot_be_started() -> None:
    with LLM(num_pages=64) as llm:
        llm._submitter._pool.shutdown()
        with pytest.raises(RuntimeError, match="cannot schedule new futures"):
            llm.generate(["one", "two"], {"max_tokens": 1})
        assert len(llm.generate("one", {"max_tokens": 1})) == 1
