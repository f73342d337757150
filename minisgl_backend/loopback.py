"""HTTP and raw gRPC calls to this machine that bypass any proxy named by the environment.

A proxy could not reach this machine, so the server would never appear to be ready.
"""

from __future__ import annotations

import urllib.request
from functools import cache
from http.client import HTTPException, HTTPResponse
from typing import Final, cast

DIRECT: Final = (("grpc.enable_http_proxy", 0),)
"""Options of a gRPC channel."""

STREAM_INFER: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
"""tritonserver's method for streams; a channel that gets no serializers takes and gives bytes."""


def open_local(request: str | urllib.request.Request, *, timeout_s: float) -> HTTPResponse:
    """Like ``urllib.request.urlopen``, but every failure is an ``OSError``."""
    try:
        return cast(HTTPResponse, _opener().open(request, timeout=timeout_s))
    except HTTPException as error:  # the other side does not speak HTTP, or died mid-answer
        raise OSError(f"no answer in HTTP: {error!r}") from None


@cache
def _opener() -> urllib.request.OpenerDirector:
    """An opener for HTTP only: the default one reads all the machine's certificates, in 20 ms."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
