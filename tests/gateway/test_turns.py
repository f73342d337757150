"""Conversations become turns of a system message, user and assistant."""

from __future__ import annotations

from typing import Any

import pytest
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
