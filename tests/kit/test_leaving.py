"""Clients that leave say in one way that no more responses come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from minisgl_client.request import build

from minisgl_backend.errors import EngineFailure
from minisgl_kit.leaving import EventStreamClose, GrpcCancel
from tests.client.test_retries import BREAK, STATUS, Script, grpc_server, http_server

VALUES = {"text_input": "x", "stream": True}


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "the stream ended early"),
        ([BREAK], "UNAVAILABLE: Socket closed"),
        ([STATUS], "UNIMPLEMENTED: no such method"),
    ],
)
def test_the_end_of_a_grpc_stream(steps: Sequence[str], message: str) -> None:
    with grpc_server(Script([["a", *steps]])) as address:
        client = GrpcCancel(address, build("minisgl", "", VALUES).to_grpc(None))
        client.next()
        with pytest.raises(EngineFailure, match=message):
            client.next()
        client.leave()


@pytest.mark.parametrize(
    ("steps", "message"),
    [([BREAK], "no answer: RemoteDisconnected"), (["error: no"], "the stream ended early")],
)
def test_the_end_of_an_event_stream(steps: Sequence[str], message: str) -> None:
    with http_server(Script([steps])) as url:
        client = EventStreamClose(url.removeprefix("http://"), "/", VALUES)
        with pytest.raises(EngineFailure, match=message):
            for _ in range(2):
                client.next()
        client.leave()
