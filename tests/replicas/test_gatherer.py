"""What a replica reports at once, what waits for more, and in which order."""

from __future__ import annotations

import json

from minisgl_backend.replicas.gatherer import Gatherer, Happened
from minisgl_backend.replicas.messages import Update, decode_event
from minisgl_backend.request import (
    Admitted,
    Finished,
    FinishReason,
    Generated,
    RequestId,
    TokenLogprobs,
)

DONE = Finished(FinishReason.LENGTH)
IDS = [RequestId(number) for number in range(1, 101)]


def gathered(*happened: Happened) -> Gatherer:
    gatherer = Gatherer()
    for each in happened:
        gatherer.add(each)
    return gatherer


def busy() -> Gatherer:
    """A replica's; two tokens of each of a hundred requests are reported, the second at 1 s."""
    gatherer = gathered(*((each, Generated(1)) for each in IDS))
    gatherer.take(0.0)
    for each in IDS:
        gatherer.add((each, Generated(2)))
    assert gatherer.take(1.0) == [["t", IDS, [[2]] * 100]]
    for each in IDS:
        gatherer.add((each, Generated(3)))
    return gatherer


def test_events_stand_between_the_tokens_of_their_request() -> None:
    scored = Generated(3, TokenLogprobs(-0.5, 1, ((3, -0.5), (4, -1.5))))
    a, b = IDS[:2]
    updates = gathered(
        (a, Admitted(0)),
        (a, Generated(5)),
        (b, Generated(6)),
        ["0"],
        (a, Generated(7)),
        (b, scored),
        (b, Generated(8)),
    ).take(0.0)
    assert [each[0] for each in updates] == ["a", "0", "t", "g", "t"]
    assert updates[2] == ["t", [b], [[6]]]
    assert decode_event(json.loads(json.dumps(updates[3]))) == scored
    assert updates[4] == ["t", [a, b], [[5, 7], [8]]]


def test_tokens_of_few_requests_are_told_at_once() -> None:
    gatherer = Gatherer()
    for number in range(5):
        for each in IDS[:10]:
            gatherer.add((each, Generated(number)))
        assert gatherer.take(0.0) == [["t", IDS[:10], [[number]] * 10]]
        assert gatherer.due_s() is None and gatherer.take(0.0) == []


def test_tokens_of_many_requests_wait_for_more() -> None:
    gatherer = busy()
    due_s = gatherer.due_s()
    assert due_s is not None and 1.0 < due_s < 1.1
    assert gatherer.take(1.0) == []
    for each in IDS[:50]:
        gatherer.add((each, Generated(4)))
    assert gatherer.take(due_s) == [["t", IDS, [[3, 4]] * 50 + [[3]] * 50]]


def test_a_first_token_and_an_end_do_not_wait_for_those_of_others() -> None:
    gatherer, new = busy(), RequestId(200)
    gatherer.add((new, Admitted(0)))
    gatherer.add((new, Generated(7)))
    assert gatherer.take(1.0) == [["a", new, 0], ["t", [new], [[7]]]]
    gatherer.add((new, Generated(8)))
    assert gatherer.take(1.0) == [], "its second one does"
    gatherer.add((new, Generated(9, is_last=True)))
    gatherer.add((new, DONE))
    assert gatherer.take(1.0) == [
        ["t", [new], [[8]]],
        ["g", new, 9, True, None],
        ["f", new, "length", None],
    ]
    assert gatherer.take(1.0, everything=True) == [["t", IDS, [[3]] * 100]]


def test_what_the_cache_publishes_is_one_update_and_comes_before_an_end() -> None:
    gatherer, one = busy(), IDS[0]
    pages: list[Update] = [["+", [11, 12], [1, 2]], ["+", [13], [3]], ["+", [12], [4]], ["-", [4]]]
    for each in (*pages, ["+", [14], [5]]):
        gatherer.add(each)
    assert gatherer.take(1.0) == [], "published pages alone wait, too"
    gatherer.add((one, DONE))
    assert gatherer.take(1.0) == [
        ["+", [11, 12, 13], [1, 2, 3]],
        ["+", [12], [4]],  # the prefix has moved to another page
        ["-", [4]],
        ["+", [14], [5]],
        ["t", [one], [[3]]],
        ["f", one, "length", None],
    ]
