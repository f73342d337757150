"""The supervisor's own HTTP endpoint: whether the server lives, is ready, and how it is.

    GET /live    200 as long as the supervisor runs: it ends once the server is given up
    GET /ready   200 while requests are served, else 503
    GET /stats   counts of all processes; callers on this machine only

Triton 24.10 says that it is ready even if its models' processes have died; this endpoint does not.
Bodies are JSON; those of /live and /ready have the phase and the reasons. A query is ignored, and
HEAD is answered as GET, without the body: probes differ. Must not know processes: two functions
tell it all that it reports.
"""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from minisgl_backend.addresses import from_here
from minisgl_backend.errors import ConfigError
from minisgl_backend.server.supervisor import Health

logger = logging.getLogger(__name__)

_IDLE_S: Final = 5.0
"""A caller that says nothing for this long is disconnected."""
_LOOK_EVERY_S: Final = 0.1
"""How soon the server notices that it must close."""
_MOST_CALLERS: Final = 32
"""If there are more, the earliest is disconnected: each takes one of the supervisor's descriptors.
"""


class HealthServer:
    """Listens as soon as it is made; answers between ``start`` and ``close``."""

    def __init__(self, host: str, port: int) -> None:
        """A ``port`` of 0 stands for a free one. Raises ``ConfigError`` if it cannot be used."""
        kind = _Server6 if ":" in host else _Server
        try:
            self._server = kind((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--health-port {port} on {host} cannot be used: {error.strerror}"
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_LOOK_EVERY_S,),
            name="health",
            daemon=True,
        )

    @property
    def address(self) -> str:
        """HOST:PORT from this machine."""
        return from_here(str(self._server.server_address[0]), self.port)

    def start(self, health: Callable[[], Health], stats: Callable[[], Mapping[str, Any]]) -> None:
        """Answer from now on with what these two functions return."""
        self._server.health, self._server.stats = health, stats
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # with the default of 5, some of many callers wait for seconds
    health: Callable[[], Health]
    stats: Callable[[], Mapping[str, Any]]

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self._callers: dict[socket.socket, None] = {}  # in order of arrival
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a caller on a thread."""
        with self._lock:
            self._callers[request] = None
            if len(self._callers) > _MOST_CALLERS:
                first = next(iter(self._callers))
                del self._callers[first]
                with contextlib.suppress(OSError):  # it has gone
                    first.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection to a caller."""
        with self._lock:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that left before its answer is no error; anything else is."""
        if not isinstance(sys.exc_info()[1], OSError):
            logger.exception("no answer to a caller of the health port")


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _IDLE_S

    def do_GET(self) -> None:
        """Answer a probe or an operator."""
        path = self.path.partition("?")[0]
        caller = self.client_address[0].removeprefix("::ffff:")  # IPv4, on a socket of IPv6
        if path == "/stats" and ipaddress.ip_address(caller).is_loopback:
            self._answer(HTTPStatus.OK, self.server.stats())
        elif path in ("/live", "/ready"):
            health = self.server.health()
            good = path == "/live" or health.ready
            body = {
                "live": True,  # it answers
                "ready": health.ready,
                "phase": health.phase.value,
                "reasons": health.reasons,
            }
            self._answer(HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE, body)
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": "there are /live, /ready and /stats"})

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing: probes come every few seconds."""

    def _answer(self, status: HTTPStatus, body: Mapping[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
