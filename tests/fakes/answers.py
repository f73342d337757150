"""An HTTP server that answers whatever a test wants."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, repeat


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """The URL at which callers get these answers one after another, and then the last forever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):  # the listener is closed
                for text in chain(answers, repeat(answers[-1])):
                    caller, _ = listener.accept()
                    with caller:
                        caller.recv(4096)
                        caller.sendall(text)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
