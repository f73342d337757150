"""One final flag, one lock, and errors that tell a client nothing about our internals."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from minisgl_backend.errors import Cancelled, InvalidRequest, Overloaded, Unsupported
from minisgl_backend.tritonserver.responder import Responder
from tests.fakes import pb_utils
from tests.waiting import PATIENCE_S


class Request(pb_utils.InferenceRequest):
    def __init__(self) -> None:
        super().__init__({}, request_id="r 1")


def response() -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse()


def test_nothing_after_the_final_flag() -> None:
    request = Request()
    responder = Responder(request)
    assert responder.send(response())
    assert responder.send(response(), final=True)
    assert not responder.send(response())
    responder.finish()
    responder.fail(InvalidRequest("x"))
    assert request.sender.num_sent == 2


def test_finish_sends_the_flag_alone() -> None:
    request = Request()
    Responder(request).finish()
    assert request.sender.sent.get() == (None, True)


def test_cancelled_is_asked_only_before_the_end() -> None:
    request = Request()
    responder = Responder(request)
    assert not responder.is_cancelled()
    request.sender.cancelled = True
    assert responder.is_cancelled()
    responder.finish()
    assert not responder.is_cancelled()  # otherwise the fake fails, and tritonserver crashes


def test_cancelled_is_not_asked_while_something_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request()
    responder = Responder(request)
    entered, leave = threading.Event(), threading.Event()
    send = request.sender.send

    def slow(*args: Any, **kwargs: Any) -> None:
        entered.set()
        assert leave.wait(PATIENCE_S)
        send(*args, **kwargs)

    monkeypatch.setattr(request.sender, "send", slow)
    request.sender.cancelled = True
    sender = threading.Thread(target=responder.finish)
    sender.start()
    assert entered.wait(PATIENCE_S)
    assert not responder.is_cancelled()
    leave.set()
    sender.join()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InvalidRequest("no"), 3, "INVALID_ARG: no"),
        (Unsupported("no"), 5, "UNSUPPORTED: no"),
        (Overloaded("no"), 4, "UNAVAILABLE: no"),
        (Cancelled("no"), 7, "CANCELLED: no"),
        (InvalidRequest("no 'a\0b', really"), 3, "INVALID_ARG: no 'a\\0b', really"),
        (
            ZeroDivisionError("secret"),
            1,
            "INTERNAL: internal error; the server's log has the details",
        ),
    ],
)
def test_errors(
    error: Exception, code: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    request = Request()
    with caplog.at_level(logging.ERROR):
        Responder(request).fail(error)
    sent, final = request.sender.sent.get()
    assert final and sent is not None
    told = sent.error()
    assert told is not None
    assert (told.code(), told.message()) == (code, message)
    # the details of what is our fault are in the log, under the request's id
    assert ("secret" in caplog.text) == (code == 1)
    assert ("r 1" in caplog.text) == (code == 1)


def test_a_last_response_that_cannot_be_sent_still_ends_the_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request()
    send = request.sender.send

    def broken(answer: Any = None, flags: int = 0) -> None:
        if answer is not None:
            raise RuntimeError("no shared memory left")
        send(flags=flags)

    monkeypatch.setattr(request.sender, "send", broken)
    assert Responder(request).send(response(), final=True)
    assert request.sender.sent.get() == (None, True)
    assert "could not be sent" in caplog.text
