"""Conversations become turns of a system message, user and assistant."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from minisgl_gateway.dialects.base import DialectName
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.dialects.mistral import alternating
from minisgl_gateway.dialects.single_calls import with_single_calls
from minisgl_gateway.turns import in_turns

PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
REMINDED = "<system-reminder>\nNow.\n</system-reminder>"


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


ANSWER = {"role": "assistant", "content": "A"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c"}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "7"}
OK = {"role": "assistant", "content": "OK."}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([user(PARTS), ANSWER, ANSWER], [user(PARTS), ANSWER, ANSWER]),
        ([user("a"), user(PARTS), ANSWER], [user("a\n\nOne.\n\nTwo."), ANSWER]),
        ([system(PARTS), user("a")], [system(PARTS), user("a")]),
        ([system("Zero."), system(PARTS), user("a")], [system("Zero.\n\nOne.\n\nTwo."), user("a")]),
        ([user("a"), system("Now.")], [user(f"a\n\n{REMINDED}")]),
        ([user(PARTS), system("Now."), ANSWER], [user(f"One.\n\nTwo.\n\n{REMINDED}"), ANSWER]),
        (
            [user("a"), ANSWER, system("Now."), user("b"), ANSWER, user("c")],
            [user("a"), ANSWER, user(f"{REMINDED}\n\nb"), ANSWER, user("c")],
        ),
        ([CALL, RESULT, system("Now."), CALL], [CALL, RESULT, user(REMINDED), CALL]),
        ([user("a"), system("Now."), system("Now.")], [user(f"a\n\n{REMINDED}\n\n{REMINDED}")]),
    ],
)
def test_conversations_in_turns(given: Any, expected: Any) -> None:
    assert in_turns(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        ([user("a"), user("b"), ANSWER], [user("a\n\nb"), ANSWER]),
        ([user("a"), CALL, RESULT, ANSWER], [user("a"), CALL, RESULT, ANSWER]),
        ([user("a"), CALL, RESULT, user("b")], [user("a"), CALL, RESULT, OK, user("b")]),
        ([user("a"), CALL, RESULT, system("Now.")], [user("a"), CALL, RESULT, OK, user(REMINDED)]),
        ([user("a"), ANSWER, ANSWER], [user("a"), {**ANSWER, "content": "A\n\nA"}]),
        ([user("a"), ANSWER, CALL, RESULT], [user("a"), ANSWER, CALL, RESULT]),
        ([user("a"), ANSWER, {"role": "assistant"}], [user("a"), ANSWER, {"role": "assistant"}]),
    ],
)
def test_user_and_assistant_in_turn(given: Any, expected: Any) -> None:
    assert alternating(given) == expected


def test_results_of_calls_with_one_id_come_in_the_order_of_the_calls() -> None:
    calls = [{"id": "", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    several = {"role": "assistant", "content": "A", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": "", "content": told} for told in ("of f", "of g")]
    assert with_single_calls([user("a"), several, *results, user("b")]) == [
        user("a"),
        {**several, "tool_calls": calls[:1]},
        results[0],
        {**several, "content": "", "tool_calls": calls[1:]},
        results[1],
        user("b"),
    ]
    (_, told) = dialect_of(None, "gemma4").messages([user("a"), several, *results], ())
    assert told["tool_responses"] == [
        {"name": "f", "response": "of f"},
        {"name": "g", "response": "of g"},
    ]


@pytest.mark.timeout(60)  # it would take minutes if each message met all others
@pytest.mark.parametrize("name", get_args(DialectName))
def test_long_conversations_of_agents(name: DialectName) -> None:
    """Meanwhile the gateway does nothing else."""
    num_calls = 100_000
    calls: list[Any] = [
        {"id": str(number), "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for number in range(num_calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in calls
    ]
    at_once: list[Any] = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    in_pairs: list[Any] = [
        message
        for at in range(0, num_calls // 4, 2)
        for message in (
            {"role": "assistant", "content": "", "tool_calls": calls[at : at + 2]},
            *results[at : at + 2],
        )
    ]
    for conversation in (at_once, in_pairs):
        told = dialect_of(None, name).messages([user("a"), *conversation], ())
        assert conversation[-1]["content"] in str(told[-1])
