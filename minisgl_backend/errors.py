"""Every error of the engine, sorted by who is to blame.

    MiniSGLError
    + RequestError            the caller's request cannot be served
    | x InvalidRequest        INVALID_ARG: it is wrong
    | x Unsupported           UNSUPPORTED: it is right, but not offered
    x Overloaded              UNAVAILABLE: right and offered, but not now
    x Cancelled               CANCELLED: the caller gave it up
    x EngineFailure           INTERNAL: our fault; the log has the story
    x ConfigError             the operator's options or model files; the load fails
    x InvariantError          our own bookkeeping is broken; never hidden, not even by ``python -O``

The messages of the first five reach clients: one short sentence, without a traceback, a path or the
name of a shared-memory region.
"""

from __future__ import annotations

from typing import ClassVar


class MiniSGLError(Exception):
    """Base of all errors raised on purpose; ``code`` is the word that starts the wire message."""

    code: ClassVar[str] = "INTERNAL"


class RequestError(MiniSGLError):
    """The request itself is at fault; sending it again does not help."""

    code = "INVALID_ARG"


class InvalidRequest(RequestError):
    """A value is missing, malformed, out of range or contradicts another."""


class Unsupported(RequestError):
    """A known option that this server does not offer."""

    code = "UNSUPPORTED"


class Overloaded(MiniSGLError):
    """The queue is full, the server drains, or the engine is down; later may work."""

    code = "UNAVAILABLE"


class Cancelled(MiniSGLError):
    """The caller cancelled; not logged as an error."""

    code = "CANCELLED"


class EngineFailure(MiniSGLError):
    """The engine could not finish an accepted request."""


class ConfigError(MiniSGLError):
    """An option, a model file or the machine does not allow the engine to start."""


class InvariantError(MiniSGLError):
    """A law of the engine's own bookkeeping is broken."""
