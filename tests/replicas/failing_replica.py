"""Replicas that cannot start: the first loads forever, the others have a cause."""

from __future__ import annotations

import signal
import socket
import sys

from minisgl_backend.replicas.messages import send

if __name__ == "__main__":
    number, descriptor = map(int, sys.argv[1:3])
    if number == 0:
        signal.pause()
    send(socket.socket(fileno=descriptor), {"error": "its GPU is taken"})
