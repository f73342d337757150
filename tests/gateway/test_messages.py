"""The Messages API without a server: blocks to messages, pieces to events, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from minisgl_client.answer import ChatFormat, Delta, Result
from minisgl_gateway.body import parse
from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.chat import Chat
from minisgl_gateway.counts import Counts
from minisgl_gateway.errors import ApiError, busy, internal, invalid, is_anthropic
from minisgl_gateway.generation import MAX_STOPS, Policy
from minisgl_gateway.json_reading import MOST_DEPTH
from minisgl_gateway.keys import Keys
from minisgl_gateway.messages.rendering import SIGNATURE, MessagesRenderer
from minisgl_gateway.messages.schema import MessagesRequest
from minisgl_gateway.messages.translation import chat_of
from minisgl_gateway.parts import Ending, Part, Piece
from minisgl_gateway.thinking import Thought
from minisgl_gateway.tools import Calls
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HI = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = CalledTool("f", '{"a": "é"}')
HERMES = ChatFormat(
    tool_dialect="hermes",
    tool_marks=frozenset(),
    thinking=None,
    begins_thinking=False,
    variables=frozenset({"messages", "tools"}),
)
THINKS = {"type": "enabled", "budget_tokens": 1024}


def read(*messages: Any, **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [*messages] or [HI], **fields}
    return parse(MessagesRequest, json.dumps(body).encode())


def chat(*messages: Any, **fields: Any) -> Chat:
    return chat_of(read(*messages, **fields))


# --- the way in ----------------------------------------------------------------------------------


def test_blocks_become_messages() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    asked = chat(
        HI,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Look:", "citations": None},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": "é"}, **cached},
                {"type": "tool_use", "id": "u", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "7"},
                {
                    "type": "tool_result",
                    "tool_use_id": "u",
                    "content": [{"type": "text", "text": "none"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on.", **cached},
            ],
        },
        system=[{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Now."}],
    )
    assert asked.messages == [
        {
            "role": "system",
            "content": [
                {"type": "text", "text": "Be brief."},
                {"type": "text", "text": "Now."},
            ],
        },
        HI,
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "t",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": "é"}'},
                },
                {"id": "u", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t", "content": "7"},
        {"role": "tool", "tool_call_id": "u", "content": "Error: none"},
        {"role": "user", "content": "Go on."},
    ]


def test_what_another_model_thought_in_secret_is_not_told() -> None:
    secret = {"type": "redacted_thinking", "data": "EmwKAhgB"}
    said = {"role": "assistant", "content": [secret, {"type": "text", "text": "Yes."}]}
    assert chat(HI, said, HI).messages == [HI, {"role": "assistant", "content": "Yes."}, HI]


def test_results_of_tools_stand_where_they_were_told() -> None:
    result = {"type": "tool_result", "tool_use_id": "t"}
    text = {"type": "text", "text": "x"}
    asked = chat({"role": "user", "content": [text, text, result, text]})
    assert [message["role"] for message in asked.messages] == ["user", "tool", "user"]
    assert asked.messages[0]["content"] == [text, text]
    assert asked.messages[1]["content"] == ""


def test_system_messages_may_come_later() -> None:
    asked = chat(HI, {"role": "system", "content": "Be brief."}, HI)
    reminder = "<system-reminder>\nBe brief.\n</system-reminder>"
    assert asked.messages == [{"role": "user", "content": f"Hi\n\n{reminder}\n\nHi"}]


def test_what_claude_code_tells_accounting_does_not_reach_the_model() -> None:
    """It changes with each request, and would keep all of the prompt out of the prefix cache."""

    def told(system: Any) -> Any:
        return chat(system=system).messages[:-1]

    billing = "x-anthropic-billing-header: cc_version=2.1.328.0f1; cc_entrypoint=cli; cch=3a9f2;"
    first, cached = {"type": "text", "text": billing}, {"type": "text", "text": "Be brief."}
    brief = [{"role": "system", "content": "Be brief."}]
    assert told([first, cached]) == told([cached]) == brief
    assert told(f"{billing}\nBe brief.") == brief
    assert told(billing) == told([first]) == []
    about = f"Explain {billing}"
    assert told(about) == [{"role": "system", "content": about}]


def test_an_answer_is_not_continued() -> None:
    with pytest.raises(ApiError, match="the last message"):
        chat(HI, {"role": "assistant", "content": "Par"})


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        (None, Calls()),
        ({"type": "auto"}, Calls()),
        ({"type": "auto", "disable_parallel_tool_use": True}, Calls(parallel=False)),
        ({"type": "any"}, Calls(required=True)),
        (
            {"type": "tool", "name": "f"},
            Calls.of("f"),
        ),
        ({"type": "none"}, Calls(is_offered=False)),
    ],
)
def test_choices_of_tools(choice: Any, calls: Calls) -> None:
    asked = chat(tools=[{**TOOL, "strict": True}], tool_choice=choice)
    assert asked.calls == calls
    (tool,) = asked.tools
    assert tool.name == "f" and tool.strict and tool.parameters == {"type": "object"}


def test_too_many_stop_strings_have_the_name_that_callers_gave_them() -> None:
    one_call = {"type": "auto", "disable_parallel_tool_use": True}
    stops = [str(number) for number in range(MAX_STOPS)]
    asked = chat(tools=[TOOL], tool_choice=one_call, stop_sequences=stops)
    with pytest.raises(ApiError, match=r"^stop_sequences must have fewer than 16") as refused:
        asked.generation(Policy(timeout_s=30, chat_tokens=512), asked.template(HERMES))
    assert refused.value.param == "stop_sequences"


@pytest.mark.parametrize(
    "choice",
    [{"type": "tool"}, {"type": "tool", "name": "g"}, {"type": "any", "name": "f"}],
)
def test_a_choice_of_what_is_no_tool(choice: Any) -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        chat(tools=[TOOL], tool_choice=choice)
    with pytest.raises(ApiError, match="goes with tools"):
        chat(tool_choice={"type": "any"})


def test_tools_are_strict_only_if_they_say_so() -> None:
    assert [tool.strict for tool in chat(tools=[TOOL]).tools] == [False]


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        (THINKS, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "between_tools"}, True),
    ],
)
def test_a_model_thinks_if_it_is_asked_to(thinking: Any, thinks: bool) -> None:
    asked = chat(thinking=thinking, output_config={"effort": "low"})
    assert asked.wishes.thinks is thinks and asked.wishes.effort == "low"


def test_forms_of_the_answer() -> None:
    form = {"type": "json_schema", "schema": {"type": "null"}}
    newer, older = chat(output_config={"format": form}), chat(output_format=form)
    assert newer.form == older.form == {"json": {"type": "null"}}
    assert (newer.form_param, older.form_param) == ("output_config.format", "output_format")
    with pytest.raises(ApiError, match="does not go with"):
        chat(output_config={"format": form}, output_format=form)


def test_sampling_parameters() -> None:
    asked = chat(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"])
    assert asked.parameters == {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    assert asked.stop == ["x"] and asked.tells_stop and asked.max_tokens == 9
    assert chat().parameters == {}
    assert chat(top_p=0).parameters["top_p"] == pytest.approx(1e-9)


# --- the way out ---------------------------------------------------------------------------------


def told(stream: bytes) -> list[dict[str, Any]]:
    """The data of events; Anthropic's client must understand each."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] not in ("ping", "error"):
            EVENT.validate_python(found[-1])
    return found


def pieces(*parts: list[Part], ending: Ending | None = None) -> list[Piece]:
    num_calls = sum(part is CALL for each in parts for part in each)
    made = [Piece(Delta(num_input_tokens=3, num_cached_tokens=2), each) for each in parts]
    return [*made, Piece(Delta(), [], num_calls, ending or Ending("stop"))]


def streamed(given: Sequence[Piece], **fields: Any) -> list[dict[str, Any]]:
    renderer = MessagesRenderer(read(stream=True, **fields))
    writer = renderer.writer(0)
    events = b"".join(writer.push(piece) for piece in given)
    return told(events + renderer.closing(Counts(3, 5, 2)))


def test_events_of_thoughts_texts_and_calls_in_order() -> None:
    events = streamed(
        pieces([], [Thought("H")], [Thought("m."), "Lo"], ["ok\u2028:", CALL, CALL]),
        thinking=THINKS,
    )
    start, delta, stop = (f"content_block_{what}" for what in ("start", "delta", "stop"))
    assert [event["type"] for event in events] == [
        *("message_start", "ping"),
        *(start, delta, delta, delta, stop),
        *(start, delta, delta, stop),
        *(start, delta, stop, start, delta, stop),
        *("message_delta", "message_stop"),
    ]
    message = events[0]["message"]
    assert message["usage"]["input_tokens"] == 1
    assert message["usage"]["cache_read_input_tokens"] == 2
    deltas = [event["delta"] for event in events if event["type"] == delta]
    assert [one["type"] for one in deltas] == [
        *("thinking_delta", "thinking_delta", "signature_delta"),
        *("text_delta", "text_delta"),
        *("input_json_delta", "input_json_delta"),
    ]
    assert "".join(one.get("text", "") for one in deltas) == "Look\u2028:"
    assert [one["partial_json"] for one in deltas[-2:]] == [CALL.arguments] * 2
    last = events[-2]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 5


def test_a_whole_answer() -> None:
    parts: list[Part] = [Thought("Hm."), "Look:", CALL]
    result = Result("", "stop", None, 3, 5, 2, (), None, None, "", None, 0.0)
    renderer = MessagesRenderer(read(thinking=THINKS))
    body = json.loads(renderer.body([Piece(result, parts, 1, Ending("stop"))], Counts(3, 5, 2)))
    thinking, text, call = body["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
    assert text == {"type": "text", "text": "Look:"}
    assert call["name"] == "f" and call["input"] == {"a": "é"}
    assert body["id"] == renderer.id and body["stop_reason"] == "tool_use"
    assert body["usage"]["input_tokens"] == 1 and body["usage"]["cache_read_input_tokens"] == 2
    sent_back = chat(HI, {"role": "assistant", "content": body["content"]}, HI).messages[1]
    assert sent_back["content"] == "Look:" and sent_back["reasoning_content"] == "Hm."


def test_an_input_in_which_the_model_repeats_a_key() -> None:
    call = CalledTool("f", '{"a": 1, "a": 2}')
    result = Result("", "stop", None, 3, 5, 2, (), None, None, "", None, 0.0)
    body = json.loads(
        MessagesRenderer(read()).body([Piece(result, [call], 1, Ending("stop"))], Counts(3, 5, 2))
    )
    assert body["content"][0]["input"] == {"a": 2}
    deltas = [event["delta"] for event in streamed(pieces([call])) if "delta" in event]
    assert deltas[0]["partial_json"] == call.arguments


def test_an_input_as_deep_as_a_call_may_be() -> None:
    """A call that is deeper stays text: the answer could not be written."""
    call = CalledTool("f", '{"a":' * MOST_DEPTH + "1" + "}" * MOST_DEPTH)
    result = Result("", "stop", None, 3, 5, 2, (), None, None, "", None, 0.0)
    body = MessagesRenderer(read()).body([Piece(result, [call], 1, Ending("stop"))], Counts())
    assert json.loads(body)["content"][0]["input"] == json.loads(call.arguments)


@pytest.mark.parametrize(
    "thinking", [None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}]
)
def test_thoughts_that_were_not_asked_for_are_not_told(thinking: Any) -> None:
    events = streamed(pieces([Thought("Hm."), "Yes."]), thinking=thinking)
    blocks = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert blocks == ["text"]


@pytest.mark.parametrize(
    ("ending", "reason", "sequence"),
    [
        (Ending("stop"), "end_turn", None),
        (Ending("stop", "x"), "stop_sequence", "x"),
        (Ending("length"), "max_tokens", None),
    ],
)
def test_why_an_answer_ended(ending: Ending, reason: str, sequence: str | None) -> None:
    last = streamed(pieces(["Lo"], ending=ending))[-2]
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


# --- errors and keys -----------------------------------------------------------------------------


@pytest.mark.parametrize("callers_id", ["", "of-a-proxy"])
def test_an_error_in_a_stream(callers_id: str) -> None:
    renderer = MessagesRenderer(read(stream=True), callers_id)
    (event,) = told(renderer.failure(busy(503, "later", "engine_unavailable")))
    assert event == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "later"},
        "request_id": callers_id or renderer.id,  # as in the header
    }


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (invalid("x"), "invalid_request_error"),
        (internal(), "api_error"),
        (ApiError(401, "x", code="x"), "authentication_error"),
        (ApiError(403, "x", code="x"), "permission_error"),
        (ApiError(404, "x", code="x"), "not_found_error"),
        (ApiError(405, "x", code="x"), "invalid_request_error"),
        (ApiError(408, "x", code="x"), "invalid_request_error"),
        (ApiError(413, "x", code="x"), "request_too_large"),
        (ApiError(429, "x", code="x"), "rate_limit_error"),
        (ApiError(504, "x", code="x"), "timeout_error"),
    ],
)
def test_types_of_errors(error: ApiError, kind: str) -> None:
    assert error.anthropic_body("req_1")["error"]["type"] == kind


@pytest.mark.parametrize(
    ("path", "is_its_own"),
    [
        ("/v1/messages", True),
        ("/v1/messages/count_tokens", True),
        ("/v1/messages/batches", True),
        ("/v1/messages_and_more", False),
        ("/v1/responses", False),
    ],
)
def test_routes_with_errors_of_their_own(path: str, is_its_own: bool) -> None:
    assert is_anthropic(path) is is_its_own


def test_a_key_in_either_header() -> None:
    keys = Keys(["one", "two"])
    one = keys.caller([(b"authorization", b"Bearer one")])
    assert keys.caller([(b"x-api-key", b"one")]) == one
    both = [(b"x-api-key", b"two"), (b"authorization", b"Bearer one")]
    assert keys.caller(both) == one
    for given in (
        [(b"x-api-key", b"three")],
        [(b"x-api-key", b"one"), (b"x-api-key", b"one")],
        [(b"x-api-key", b"one"), (b"authorization", b"Bearer three")],
    ):
        with pytest.raises(ApiError) as raised:
            keys.caller(given)
        assert raised.value.status == 401
