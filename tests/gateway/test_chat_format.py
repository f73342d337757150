"""What the chat template shows is looked up once for all callers within a period."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from minisgl_client.answer import ChatFormat, Tokens
from minisgl_client.errors import InvalidArgument, MinisglError, Unavailable
from minisgl_gateway import lookups
from minisgl_gateway.adapters import Adapters
from minisgl_gateway.chat import Chat
from minisgl_gateway.errors import ApiError
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.lookups import Lookups
from minisgl_gateway.request_state import RequestState
from minisgl_gateway.template import Template, Wishes, probe_of
from starlette.requests import Request

Variables = dict[str, Any] | None
SHOWN = ChatFormat(
    tool_dialect="hermes",
    tool_marks=frozenset(),
    thinking=("<think>", "</think>"),
    begins_thinking=False,
    variables=frozenset({"messages", "enable_thinking"}),
)

HI = ("user", "Hi")


class Engine:
    """Answers as told, after a moment; keeps the variables that it was asked with."""

    def __init__(self, answer: Callable[[Variables], ChatFormat | MinisglError]) -> None:
        self.answer = answer
        self.asked: list[Variables] = []

    async def tokenize(self, *, chat_template_kwargs: Variables, **_: Any) -> Tokens:
        self.asked.append(chat_template_kwargs)
        await asyncio.sleep(0.05)
        shown = self.answer(chat_template_kwargs)
        if isinstance(shown, MinisglError):
            raise shown
        return Tokens((1,), ("a",), "a", 10, shown)


def lookups_of(engine: Any) -> Lookups:
    options = GatewayOptions()
    return Lookups(options, engine, Adapters(options, engine))


def templates(engine: Any, *chats: Chat, left_s: float = 10.0) -> list[Template | BaseException]:
    """What is found for simultaneous chats."""
    found = lookups_of(engine)
    return asyncio.run(_all(found, chats, left_s))


async def _all(
    found: Lookups, chats: tuple[Chat, ...], left_s: float
) -> list[Template | BaseException]:
    http = Request({"type": "http"})
    RequestState(time.monotonic() + left_s).enter(http.scope)
    asking = [found.template(http, chat, (), {}) for chat in chats]
    return await asyncio.gather(*asking, return_exceptions=True)


def chat(**wishes: Any) -> Chat:
    return Chat(messages=[{"role": "user", "content": "Hi"}], wishes=Wishes(**wishes))


def test_one_answer_serves_all_who_ask_at_once() -> None:
    engine = Engine(lambda _: SHOWN)
    found = templates(engine, *[chat()] * 20)
    assert engine.asked == [None]
    assert all(isinstance(one, Template) and one.thinking == SHOWN.thinking for one in found)


def test_the_variables_that_a_chat_adds_decide_too() -> None:
    closed = ChatFormat("hermes", frozenset(), None, False, SHOWN.variables)
    engine = Engine(lambda variables: closed if variables else SHOWN)
    thinking, closing = templates(engine, chat(), chat(thinks=False))
    assert engine.asked == [None, {"enable_thinking": False}]
    assert isinstance(thinking, Template) and isinstance(closing, Template)
    assert (thinking.thinking, closing.thinking) == (SHOWN.thinking, None)
    assert closing.variables == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("messages", "probe"),
    [
        ([("user", "Is /think a path, or /no_think?")], [("user", "Hi /no_think")]),
        ([("system", "/no_think\nBe brief."), ("user", "Hi")], [("system", "/no_think"), HI]),
        (
            [("user", "/no_think"), ("assistant", "/think"), ("user", "Yes")],
            [("user", "Hi /no_think")],
        ),
        ([("system", "detailed thinking off"), HI], [("system", "detailed thinking off"), HI]),
        ([("user", "I think of /thinking and a/no_thinker")], [HI]),
        ([("assistant", None), HI], [HI]),
    ],
)
def test_switches_of_messages_decide_too(
    messages: list[tuple[str, str | None]], probe: list[tuple[str, str]]
) -> None:
    """Some templates begin thoughts, or not, as a message asks."""
    asked = [{"role": role, "content": content} for role, content in messages]
    assert [(message["role"], message["content"]) for message in probe_of(asked)] == probe


def test_switches_in_parts_of_a_message_decide_too() -> None:
    parts = [{"type": "text", "text": text} for text in ("/no_think", "Hi")]
    asked = probe_of([{"role": "user", "content": parts}])
    assert asked == [{"role": "user", "content": "Hi /no_think"}]


def test_a_template_that_cannot_be_asked_is_not_known() -> None:
    (found,) = templates(Engine(lambda _: InvalidArgument("no such role")), chat(thinks=True))
    assert isinstance(found, Template)
    assert (found.dialect.name, found.thinking) == ("plain", None)
    assert found.variables == {"enable_thinking": True}


def test_an_engine_that_is_away_is_asked_again() -> None:
    engine = Engine(lambda _: Unavailable("not yet"))

    async def twice() -> list[Template | BaseException]:
        found = lookups_of(engine)
        first = await _all(found, (chat(), chat()), 10.0)
        engine.answer = lambda _: SHOWN
        return first + await _all(found, (chat(),), 10.0)

    *away, back = asyncio.run(twice())
    assert all(isinstance(one, ApiError) and one.status == 503 for one in away)
    assert isinstance(back, Template)
    assert len(engine.asked) == 2


def test_who_has_no_time_does_not_wait() -> None:
    (found,) = templates(Engine(lambda _: SHOWN), chat(), left_s=0.001)
    assert isinstance(found, ApiError) and found.status == 504


def test_what_was_asked_long_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_MOST_FORMATS", 2)
    engine = Engine(lambda _: SHOWN)
    names = ["a", "b", "c", "c", "b", "a"]

    async def in_turn() -> None:
        found = lookups_of(engine)
        for name in names:
            await _all(found, (chat(variables={name: 1}),), 10.0)

    asyncio.run(in_turn())
    assert [list(variables or ()) for variables in engine.asked] == [["a"], ["b"], ["c"], ["a"]]
