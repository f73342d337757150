"""Python client of a MiniSGL server; talks to Triton over the network only.

``Client`` and ``AsyncClient`` ask; ``client`` shows how. Names of the wire are in ``wire``, errors
in ``errors``, answers in ``answer``, and what a request may say in ``parameters``.
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
