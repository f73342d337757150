"""Every error that the engine raises on purpose, sorted by who is to blame.

    MiniSGLError
    - RequestError         the caller: the request cannot be served
      - InvalidRequest     INVALID_ARG: the request is wrong
      - Unsupported        UNSUPPORTED: the request asks for something known that is not offered
    - Overloaded           UNAVAILABLE: nothing is wrong, but the request cannot be served now
      - Recovering         because a part of the server died
    - Cancelled            CANCELLED: the caller gave up
    - EngineFailure        INTERNAL: the engine failed; its log says why
      - EngineLost         the engine has ended, with all requests in it
    - ConfigError          the operator: an option or a model file is wrong, and the load fails
      - NotNow             because a disk is full or a port is taken, which may pass
    - InvariantError       the engine's own bookkeeping is broken

The word in capitals is the ``code`` at the beginning of the message on the wire. Messages with a
code reach clients, so each is one short sentence without a traceback, a path or the name of a
shared-memory region. ``InvariantError`` is raised, not asserted: ``python -O`` must not hide it.
"""

from __future__ import annotations

from typing import ClassVar


class MiniSGLError(Exception):
    """Base of all errors that the engine raises on purpose."""

    code: ClassVar[str] = "INTERNAL"


class RequestError(MiniSGLError):
    """The request itself is at fault, so sending it again does not help."""

    code = "INVALID_ARG"


class InvalidRequest(RequestError):
    """A value is missing, malformed, out of range or contradicts another."""


class Unsupported(RequestError):
    """A known option that this server does not offer."""

    code = "UNSUPPORTED"


class Overloaded(MiniSGLError):
    """The queue is full, the server is stopping, or the engine is down; a retry may succeed."""

    code = "UNAVAILABLE"


class Recovering(Overloaded):
    """A part of the server died, and is being started again."""


class Cancelled(MiniSGLError):
    """The caller cancelled the request, which is not logged as an error."""

    code = "CANCELLED"


class EngineFailure(MiniSGLError):
    """The engine could not finish an accepted request."""


class EngineLost(EngineFailure):
    """The engine has ended. Another one may serve the requests that it had not begun to answer."""


class ConfigError(MiniSGLError):
    """An option, a model file or the machine does not allow the engine to start."""


class NotNow(ConfigError):
    """A disk is full, or a port is taken: the same start may succeed later."""


class InvariantError(MiniSGLError):
    """A law of the engine's own bookkeeping is broken."""


def shutting_down() -> Overloaded:
    """The error of requests that a stopping engine refuses or does not finish."""
    return Overloaded("the server is shutting down")
