"""Clients that ask for a stream and then leave, each in its own way.

Knows the wire. ``leave`` returns once the client is gone. The request may go on in the server: that
is what benchmarks measure. Must not know what happens to the request.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from minisgl_backend.errors import EngineFailure
from minisgl_backend.loopback import DIRECT, STREAM_INFER


class Leaving(Protocol):
    """A client with one streamed request, which its constructor sends."""

    def next(self) -> None:
        """Wait for the next response. Raises ``EngineFailure`` if there is none."""

    def leave(self) -> None:
        """Leave."""


class GrpcCancel:
    """Cancels its gRPC stream."""

    def __init__(self, grpc_address: str, message: bytes) -> None:
        import grpc

        self._channel: Any = grpc.insecure_channel(grpc_address, options=DIRECT)
        method = self._channel.stream_stream(STREAM_INFER)
        self._call: Any = method(iter([message]))

    def next(self) -> None:
        import grpc

        try:
            response = next(self._call, None)
        except grpc.RpcError as failure:
            status: Any = failure
            raise EngineFailure(f"{status.code().name}: {status.details()}") from failure
        if response is None:
            raise EngineFailure("the stream ended early")

    def leave(self) -> None:
        self._call.cancel()
        self._channel.close()


class GrpcKill:
    """A gRPC client in a process of its own, which is killed."""

    def __init__(self, grpc_address: str, message: bytes) -> None:
        command = [sys.executable, "-m", "minisgl_kit.leaving"]
        self._process = subprocess.Popen(
            [*command, grpc_address, message.hex()], stdout=subprocess.PIPE
        )

    def next(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise EngineFailure("the stream ended early")

    def leave(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class EventStreamClose:
    """Closes the connection of its stream of server-sent events."""

    def __init__(self, http_address: str, path: str, body: Mapping[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(http_address)
        headers = {"Accept": "text/event-stream", "Content-Type": "application/json"}
        self._connection.request("POST", path, json.dumps(body), headers)
        self._response: http.client.HTTPResponse | None = None

    def next(self) -> None:
        try:
            if self._response is None:
                self._response = self._connection.getresponse()
            while line := self._response.readline():
                if line.startswith(b"data:"):
                    return
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailure(f"no answer: {error!r}") from error
        raise EngineFailure("the stream ended early")

    def leave(self) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends this
    client = GrpcCancel(sys.argv[1], bytes.fromhex(sys.argv[2]))
    while True:
        client.next()
        print(flush=True)


if __name__ == "__main__":
    _main()
