"""System messages anywhere in a conversation become one, at the beginning."""

from __future__ import annotations

from typing import Any

import pytest
from minisgl_gateway.system_messages import with_system_first

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
        ([user("a"), user(PARTS), ANSWER], [user("a"), user(PARTS), ANSWER]),
        ([system(PARTS), user("a")], [system(PARTS), user("a")]),
        ([system("Zero."), system(PARTS), user("a")], [system("Zero.\n\nOne.\n\nTwo."), user("a")]),
        ([user("a"), system("Now.")], [user(f"a\n\n{REMINDED}")]),
        ([user(PARTS), system("Now."), ANSWER], [user(f"One.\n\nTwo.\n\n{REMINDED}"), ANSWER]),
        (
            [user("a"), ANSWER, system("Now."), user("b"), ANSWER, user("c"), user("d")],
            [user("a"), ANSWER, user(f"{REMINDED}\n\nb"), ANSWER, user("c"), user("d")],
        ),
        ([CALL, RESULT, system("Now."), CALL], [CALL, RESULT, user(REMINDED), CALL]),
        ([user("a"), system("Now."), system("Now.")], [user(f"a\n\n{REMINDED}\n\n{REMINDED}")]),
    ],
)
def test_one_system_message_at_most(given: Any, expected: Any) -> None:
    assert with_system_first(given) == expected
