"""What can go wrong with a request, as exceptions that follow the server's codes.

    MinisglError
    + InvalidArgument    INVALID_ARG: the request is wrong
    + Unsupported        UNSUPPORTED: it is right, but not offered
    + Unavailable        UNAVAILABLE: not now; the queue is full, or the server starts or stops
    + Cancelled          CANCELLED: the request was cancelled
      + Closed           by closing the client
    + ServerError        INTERNAL: the server's fault; its log has the details
    + Timeout            the deadline passed before there was a token
    + ConnectionFailed   the server cannot be reached; nothing was sent
    + ConnectionLost     the connection broke after the request was sent

A message is one sentence without its code. If a retry cannot repeat work, ``retryable`` is true.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final


class MinisglError(Exception):
    """Base of all errors of this package; ``code`` is the server's word for the kind of error."""

    code: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False


class InvalidArgument(MinisglError):
    """A value is missing, malformed, out of range or contradicts another."""

    code = "INVALID_ARG"


class Unsupported(MinisglError):
    """A known option that the server does not offer."""

    code = "UNSUPPORTED"


class Unavailable(MinisglError):
    """The server refused the request for now; it may work later."""

    code = "UNAVAILABLE"
    retryable = True


class Cancelled(MinisglError):
    """The request was cancelled before it had an answer."""

    code = "CANCELLED"


class Closed(Cancelled):
    """The client was closed before the answer was complete, or before the request was made."""


class ServerError(MinisglError):
    """The server could not finish an accepted request."""


class Timeout(MinisglError):
    """The deadline passed before the first token. With tokens there would be a result instead."""

    code = "TIMEOUT"


class ConnectionFailed(MinisglError):
    """The server cannot be reached; nothing was sent."""

    code = "CONNECTION_FAILED"
    retryable = True


class ConnectionLost(MinisglError):
    """The connection broke after the request was sent, or the answer ended before it was whole;
    what the server did is unknown."""

    code = "CONNECTION_LOST"


_BY_CODE: Final[dict[str, type[MinisglError]]] = {
    kind.code: kind for kind in (InvalidArgument, Unsupported, Unavailable, Cancelled, ServerError)
}
_CODED: Final = re.compile(
    rf"(?:in ensemble '[^']*', )*(?P<code>{'|'.join(_BY_CODE)}): (?P<sentence>.*)", re.DOTALL
)
_DEADLINE: Final = "the deadline passed"
"""The beginning of the server's sentence if the deadline ends a request that has no token yet."""

_OF_TRITON: Final[tuple[tuple[str, type[MinisglError]], ...]] = (
    ("is not found", InvalidArgument),  # another model's name
    ("has no available versions", Unavailable),  # while the models are loaded again
    ("is not healthy", Unavailable),  # the same, a moment earlier
    ("Server is stopping", Unavailable),  # tritonserver itself got SIGTERM
)
"""Messages of Triton itself, which have no code."""
_OF_OTHER_INPUTS: Final = re.compile(
    r"unexpected (?:shape for|inference) input .* for model '(?P<model>[^']*)'"
)
"""What Triton says if the model has no such inputs, or has a batch dimension."""


def short(value: object) -> str:
    """A value as shown in an error message, in at most 60 characters."""
    try:
        shown = repr(value)
    except Exception:  # an int with more digits than Python converts, or a bug of the object's
        shown = f"a value of {type(value).__name__} that cannot be shown"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def error_from(text: str) -> MinisglError:
    """The exception for a message of the server, such as
    ``in ensemble 'minisgl', INVALID_ARG: max_tokens must be >= 1, got 0``."""
    if found := _CODED.fullmatch(text):
        kind, sentence = _BY_CODE[found["code"]], found["sentence"]
        if kind is Unavailable and sentence.startswith(_DEADLINE):
            kind = Timeout
        return kind(sentence)
    if found := _OF_OTHER_INPUTS.search(text):
        return ServerError(
            f"the model {found['model']!r} takes other inputs: over gRPC this client speaks to "
            "ensembles without a batch dimension, such as minisgl"
        )
    kind = next((kind for words, kind in _OF_TRITON if words in text), ServerError)
    return kind(text)
