"""Python client for a MiniSGL server; talks to Triton over the network only.

``Client`` and ``AsyncClient`` send requests; ``client`` has examples. ``parameters`` lists the
parameters of requests, ``answer`` has the classes of answers, ``errors`` those of errors, and
``wire`` the names on the wire.
"""

from minisgl_client.answer import (
    ChatFormat,
    Delta,
    LoraAdapter,
    Result,
    Times,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
)
from minisgl_client.client import AsyncClient, Client
from minisgl_client.errors import (
    Cancelled,
    Closed,
    ConnectionFailed,
    ConnectionLost,
    InvalidArgument,
    MinisglError,
    ServerError,
    Timeout,
    Unavailable,
    Unsupported,
)
from minisgl_client.parameters import Parameters, StructuredOutputs
from minisgl_client.stream import AsyncStream, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "ChatFormat",
    "Client",
    "Closed",
    "ConnectionFailed",
    "ConnectionLost",
    "Delta",
    "InvalidArgument",
    "LoraAdapter",
    "MinisglError",
    "Parameters",
    "Result",
    "ServerError",
    "Stream",
    "StructuredOutputs",
    "Timeout",
    "Times",
    "TokenLogprob",
    "TokenLogprobs",
    "Tokens",
    "Unavailable",
    "Unsupported",
]
