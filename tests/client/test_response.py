"""Responses read byte by byte."""

from __future__ import annotations

import json

import pytest
from minisgl_client import Delta, MinisglError, ServerError
from minisgl_client.response import EventReader, deltas_of_event, json_object

EVENTS = [{"text_output": "a\u2028b\x85c\n"}, {"text_output": "猫", "finish_reason": "stop"}]
BODY = b"".join(
    b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n" for event in EVENTS
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(BODY)])
def test_events_however_they_are_cut(size: int) -> None:
    """Characters at which Python would split lines are ordinary text here."""
    reader = EventReader()
    pieces = [BODY[begin : begin + size] for begin in range(0, len(BODY), size)]
    found = [json_object(event) for piece in pieces for event in reader.feed(piece)]
    assert found == EVENTS
    assert [deltas_of_event(event) for event in found] == [
        [Delta("a\u2028b\x85c\n")],
        [Delta("猫", "stop")],
    ]


@pytest.mark.timeout(60)  # it would take hours if each piece copied those before
def test_an_event_of_very_many_pieces() -> None:
    reader = EventReader()
    piece = b"x" * 4096
    reader.feed(b"data: ")
    assert not any(reader.feed(piece) for _ in range(2**14))
    (event,) = reader.feed(b"\n\n")
    assert len(event) == 2**26


@pytest.mark.parametrize("data", [b"", b"<html>", b"[]", b"null", b"\xff"])
def test_an_answer_that_is_not_from_triton(data: bytes) -> None:
    with pytest.raises(ServerError, match="not the JSON of Triton"):
        json_object(data)


def test_an_error_inside_a_stream() -> None:
    with pytest.raises(MinisglError, match=r"^queue full$"):
        deltas_of_event({"error": "in ensemble 'minisgl', UNAVAILABLE: queue full"})


def test_an_answer_without_text() -> None:
    with pytest.raises(ServerError, match="answered without text_output"):
        deltas_of_event({"model_name": "llm_engine", "output_ids": [5]})
