"""The Responses API without a server: items to messages, pieces to events, what is kept."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from minisgl_client.answer import Delta, Result, TokenLogprob, TokenLogprobs
from minisgl_gateway.body import parse
from minisgl_gateway.call_syntax import CalledTool
from minisgl_gateway.chat import Chat
from minisgl_gateway.counts import Counts
from minisgl_gateway.errors import ApiError, deadline_passed
from minisgl_gateway.parts import AnswerReader, Ending, Part, Piece
from minisgl_gateway.responses.answer import Response
from minisgl_gateway.responses.memory import Kept, ResponseMemory
from minisgl_gateway.responses.rendering import ResponseRenderer
from minisgl_gateway.responses.schema import ResponsesRequest
from minisgl_gateway.responses.strictness import can_be_enforced
from minisgl_gateway.responses.translation import chat_of, messages_of, messages_of_output
from minisgl_gateway.thinking import ThinkingReader, Thought
from minisgl_gateway.tools import Calls
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
OTHER = {"type": "function", "name": "g", "strict": False}
NAMESPACE = {"type": "namespace", "name": "crm", "description": "Of customers.", "tools": [TOOL]}
CALL = CalledTool("f", '{"a": "é"}')


def read(**fields: Any) -> ResponsesRequest:
    return parse(ResponsesRequest, json.dumps({"model": "m", "input": "Hi", **fields}).encode())


def no_item(id: str) -> NoReturn:
    raise AssertionError(id)


def messages(*items: Any) -> list[dict[str, Any]]:
    return messages_of(read(input=list(items)).input, no_item)


def chat(**fields: Any) -> Chat:
    request = read(**fields)
    return chat_of(request, messages_of(request.input, no_item))


# --- the way in ----------------------------------------------------------------------------------


def test_a_text_is_what_the_user_says() -> None:
    asked = chat(instructions="Be brief.")
    assert asked.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]


def test_what_an_assistant_thinks_says_and_calls_is_one_message() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": []}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    told = {"type": "function_call_output", "call_id": "c", "output": "7"}
    found = messages(
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {**thought, "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {**said, "type": "message", "id": "msg_1", "status": "completed"},
        called,
        {**called, "call_id": "d"},
        told,
        {**told, "call_id": "d", "output": [{"type": "input_text", "text": "8"}]},
        said,
    )
    function = {"name": "f", "arguments": "{}"}
    assert found == [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "Look:",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"id": "d", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "tool", "tool_call_id": "d", "content": "8"},
        {"role": "assistant", "content": "Look:"},
    ]


@pytest.mark.parametrize(
    ("before", "after"), [(["One", "two"], ["three"]), (["One"], ["two", "three"])]
)
def test_nothing_is_lost_of_what_an_assistant_says_around_a_call(
    before: list[str], after: list[str]
) -> None:
    def said(texts: list[str]) -> dict[str, Any]:
        parts = [{"type": "output_text", "text": text} for text in texts]
        return {"role": "assistant", "content": parts}

    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    (message,) = messages(said(before), called, said(after))
    assert [part["text"] for part in message["content"]] == ["One", "two", "three"]
    assert len(message["tool_calls"]) == 1


@pytest.mark.timeout(60)  # it would take minutes if each text met all others
def test_very_many_texts_of_an_answer() -> None:
    said = {"role": "assistant", "content": "One."}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = read(input=[called, said]).input
    assert isinstance(items, list)
    (message,) = messages_of(items * 80_000, no_item)
    assert len(message["content"]) == 80_000
    assert len(message["tool_calls"]) == 80_000


def test_messages_of_an_assistant_in_a_row_stay_apart() -> None:
    said = {"role": "assistant", "content": "One."}
    assert messages(said, said) == [said, said]


def test_thoughts_belong_to_the_text_or_the_calls_after_them() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    one, two = ({"role": "assistant", "content": text} for text in ("One.", "Two."))
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    thinking = {"reasoning_content": "a"}
    assert messages(one, thought("a"), two) == [one, {**two, **thinking}]
    assert messages(thought("a"), one, two) == [{**one, **thinking}, two]
    assert messages(one, thought("a"), call) == [{**one, **thinking, "tool_calls": calls}]
    assert messages(one, thought("a"), two, call) == [one, {**two, **thinking, "tool_calls": calls}]
    (whole,) = messages(thought("a"), one, thought("b"), thought("c"), call)
    assert whole == {**one, "reasoning_content": "abc", "tool_calls": calls}
    (alone,) = messages(thought("a"), call)
    assert alone == {"role": "assistant", "content": "", **thinking, "tool_calls": calls}


@pytest.mark.parametrize("texts", [["b"], [], ["b", "c"]])
@pytest.mark.parametrize("before", ["a", ""])
def test_thoughts_that_were_cut_off_belong_to_the_text_before_them(
    texts: list[str], before: str
) -> None:
    parts = [{"type": "reasoning_text", "text": text} for text in texts]
    first = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": before}]}
    said, user = ({"role": role, "content": "x"} for role in ("assistant", "user"))
    thoughts = before + "".join(texts)
    whole = {**said, "reasoning_content": thoughts} if thoughts else said
    cut_off = {"type": "reasoning", "content": parts}
    assert messages(user, first, said, cut_off, user) == [user, whole, user]
    assert messages(user, first, said, cut_off) == [user, whole]
    assert messages_of_output([first, {"type": "message", **said}, cut_off]) == [whole]


def test_a_summary_stands_for_thoughts_without_text() -> None:
    summary = [{"type": "summary_text", "text": "Thought of it."}]
    (message,) = messages({"type": "reasoning", "summary": summary, "encrypted_content": "x"})
    assert message["reasoning_content"] == "Thought of it."


def test_roles_are_those_of_templates() -> None:
    roles = ["developer", "system", "user"]
    found = messages(*({"role": role, "content": "x"} for role in roles))
    assert [message["role"] for message in found] == ["system", "system", "user"]


def test_several_parts_stay_parts() -> None:
    parts = [{"type": "input_text", "text": text} for text in "ab"]
    (message,) = messages({"role": "user", "content": parts})
    assert message["content"] == [{"type": "text", "text": text} for text in "ab"]


def test_what_sdks_add_to_items_is_taken() -> None:
    part = {"type": "output_text", "text": "x", "annotations": [], "logprobs": [], "parsed": {}}
    answered = {"type": "message", "role": "assistant", "content": [part], "phase": None}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    (message,) = messages(answered, {**called, "parsed_arguments": {"a": 1}, "status": "completed"})
    assert message["content"] == "x" and len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("choice", "calls", "names"),
    [
        ("auto", Calls(), "fg"),
        ("none", Calls(is_offered=False), "fg"),
        ("required", Calls(required=True), "fg"),
        ({"type": "function", "name": "g"}, Calls.of("g"), "fg"),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "g"}],
            },
            Calls(required=True),
            "g",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            Calls(),
            "f",
        ),
    ],
)
def test_choices_of_tools(choice: Any, calls: Calls, names: str) -> None:
    asked = chat(tools=[TOOL, OTHER], tool_choice=choice)
    assert asked.calls == calls
    assert "".join(tool.name for tool in asked.tools) == names


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "h"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "h"}]},
    ],
)
def test_a_choice_of_what_is_no_tool(choice: Any) -> None:
    with pytest.raises(ApiError, match="none of the tools"):
        chat(tools=[TOOL], tool_choice=choice)


def test_a_long_name_of_what_is_no_tool_is_not_told() -> None:
    with pytest.raises(ApiError, match=r"a string of 10000 characters, which is none of the tools"):
        chat(tools=[TOOL], tool_choice={"type": "function", "name": "h" * 10_000})


def test_a_tool_whose_arguments_are_no_object_is_not_strict() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "integer"}}
    assert [tool.strict for tool in chat(tools=[tool]).tools] == [False]


def test_a_call_cannot_be_required_without_tools() -> None:
    with pytest.raises(ApiError, match="goes with tools"):
        chat(tool_choice="required")


@pytest.mark.parametrize(
    ("schema", "is_strict"),
    [
        ({"type": "object"}, True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}]}}}, True),
        ({"type": "object", "properties": {"a": {"not": {"type": "null"}}}}, False),
        ({"type": "array", "items": {"if": True}}, False),
        ({"$defs": {"a": {"oneOf": []}}, "$ref": "#/$defs/a"}, False),
        ({"anyOf": [{"type": "string", "x-own": 1}]}, False),
        ({"properties": []}, False),
        ({"$ref": "https://example.org/schema"}, False),
        (7, False),
        ({"properties": {"id": {"enum": [2**53, 2**53 + 2]}}}, False),
        ({"properties": {"id": {"const": 2**53}}}, True),
    ],
)
def test_tools_are_strict_if_their_schemas_allow_it(schema: Any, is_strict: bool) -> None:
    assert can_be_enforced(schema) is is_strict
    if isinstance(schema, dict):
        tool = {"type": "function", "name": "f", "parameters": schema}
        assert [tool.strict for tool in chat(tools=[tool]).tools] == [is_strict]
        for said in (True, False):
            (made,) = chat(tools=[{**tool, "strict": said}]).tools
            assert made.strict is said


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "null"}, "strict": True},
            {"json": {"type": "null"}},
        ),
    ],
)
def test_forms_of_the_answer(form: Any, expected: Any) -> None:
    asked = chat(text={"format": form, "verbosity": "low"})
    assert asked.form == expected
    assert asked.form_param == "text.format"


@pytest.mark.parametrize("effort", ["none", "low", "xhigh", None])
def test_efforts(effort: str | None) -> None:
    asked = chat(reasoning={"effort": effort, "summary": "auto"})
    assert (asked.wishes.thinks, asked.wishes.effort) == (None, effort)


def test_logprobs_are_asked_for_by_include() -> None:
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    assert chat(include=include, top_logprobs=3).parameters == {"num_logprobs": 3}
    assert chat(include=include).parameters == {"num_logprobs": 0}
    with pytest.raises(ApiError, match="goes with include"):
        chat(top_logprobs=3)


def test_functions_of_a_namespace_have_names_of_their_own_for_the_model() -> None:
    told = {"type": "function_call_output", "call_id": "c", "output": "7"}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    asked = chat(
        tools=[OTHER, {**NAMESPACE, "tools": [{**TOOL, "description": "Calls."}, OTHER]}],
        input=[{**called, "namespace": "crm"}, told, {"role": "user", "content": "Again."}],
    )
    assert [(tool.name, tool.description) for tool in asked.tools] == [
        ("g", None),
        ("crm__f", "Of customers.\nCalls."),
        ("crm__g", "Of customers."),
    ]
    assert asked.messages[0]["tool_calls"][0]["function"]["name"] == "crm__f"


@pytest.mark.parametrize("tools", [[NAMESPACE, NAMESPACE], [NAMESPACE, {**TOOL, "name": "crm__f"}]])
def test_two_functions_of_one_name_for_the_model(tools: Any) -> None:
    with pytest.raises(ApiError, match=r'tools has "crm__f" twice') as raised:
        chat(tools=tools)
    assert raised.value.param == "tools"


def test_functions_of_namespaces_are_bounded_together() -> None:
    functions = [{"type": "function", "name": f"f{n}"} for n in range(1000)]
    namespaces = [{**NAMESPACE, "name": name, "tools": functions} for name in "ab"]
    with pytest.raises(ApiError, match="tools must be at most 1024, got 2000"):
        chat(tools=namespaces)
    assert len(chat(tools=namespaces[:1]).tools) == 1000


def test_an_agent_may_say_who_it_is() -> None:
    request = read(client_metadata={"thread_id": "1", "depth": 2})
    assert request.without_effect & request.model_fields_set == {"client_metadata"}


# --- the way out ---------------------------------------------------------------------------------


def told(stream: bytes) -> list[dict[str, Any]]:
    """The data of events; the official client must understand each."""
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    return found


def streamed(pieces: Sequence[Piece], **fields: Any) -> tuple[list[dict[str, Any]], list[Response]]:
    kept: list[Response] = []
    renderer = ResponseRenderer(read(stream=True, **fields), kept.append)
    writer = renderer.writer(0)
    events = b"".join(writer.push(piece) for piece in pieces)
    return told(events + renderer.closing(Counts(3, 5, 2))), kept


def pieces(*parts: list[Part], reason: Any = "stop") -> list[Piece]:
    made = [Piece(Delta(num_output_tokens=1), each) for each in parts]
    return [*made, Piece(Delta(finish_reason=reason), [], 0, Ending(reason))]


def test_events_of_thoughts_texts_and_calls_in_order() -> None:
    events, (kept,) = streamed(
        pieces([], [Thought("H")], [Thought("m."), "Lo"], ["ok\u2028:", CALL, CALL])
    )
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *(*item, "reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done", *done),
        *(*item, "output_text.delta", "output_text.delta", "output_text.done", *done),
        *(*call, *call),
        "completed",
    ]
    response = events[-1]["response"]
    assert response == json.loads(kept.model_dump_json())
    thoughts, said, *calls = response["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert said["content"][0]["text"] == "Look\u2028:"
    assert [one["arguments"] for one in calls] == [CALL.arguments] * 2
    assert len({one["call_id"] for one in calls}) == 2
    by_index = {event["output_index"]: event["item"] for event in events if "item" in event}
    assert [by_index[index] for index in range(4)] == response["output"]
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert response["usage"]["total_tokens"] == 8


def test_a_call_of_a_function_in_a_namespace() -> None:
    called: list[Part] = [CalledTool("crm__f", "{}"), CALL]
    events, _ = streamed(pieces(called), tools=[NAMESPACE, TOOL])
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in done] == ["f", "f"]
    response = events[-1]["response"]
    assert [call.get("namespace") for call in response["output"]] == ["crm", None]
    assert response["tools"][0] == {**NAMESPACE, "tools": [response["tools"][1]]}
    (message,) = messages_of_output(response["output"])
    names = [call["function"]["name"] for call in message["tool_calls"]]
    assert names == ["crm__f", "f"]


def test_a_whole_answer_is_what_its_stream_ends_with() -> None:
    parts: list[Part] = [Thought("Hm."), "Look:", CALL]
    request = read(instructions="x", tools=[TOOL], store=False)
    kept: list[Response] = []
    whole = ResponseRenderer(request, kept.append)
    result = Result("", "stop", None, 3, 5, 2, (), None, None, "", None, 0.0)
    body = json.loads(whole.body([Piece(result, parts, 1, Ending("stop"))], Counts(3, 5, 2)))
    events, _ = streamed(pieces(parts), instructions="x", tools=[TOOL], store=False)
    last = events[-1]["response"]
    assert kept == []

    def anonymous(answer: dict[str, Any]) -> Any:
        items = [{**item, "id": "", "call_id": ""} for item in answer["output"]]
        return {**answer, "id": "", "created_at": 0, "completed_at": 0, "output": items}

    assert anonymous(body) == anonymous(last)


def test_an_answer_that_is_cut_is_incomplete() -> None:
    events, _ = streamed(pieces(["Lo"], reason="length"))
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert "completed_at" not in response


@pytest.mark.parametrize("given", [{}, {"temperature": 0.5}, {"temperature": 1, "top_p": 0.9}])
def test_an_answer_repeats_what_was_asked_of_sampling_and_no_default(given: dict[str, Any]) -> None:
    events, _ = streamed(pieces(["Lo"]), **given)
    wanted = {"temperature": None, "top_p": None, **given}
    for event in (events[0], events[-1]):
        assert {name: event["response"][name] for name in wanted} == wanted


def test_an_answer_that_breaks_off_has_failed() -> None:
    kept: list[Response] = []
    renderer = ResponseRenderer(read(stream=True), kept.append)
    events = told(renderer.push(pieces(["Lo"])[0]) + renderer.failure(deadline_passed()))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-2]["code"] == "timeout"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    assert kept == []


def test_logprobs_are_those_of_the_text() -> None:
    def token(text: str) -> TokenLogprobs:
        return TokenLogprobs(TokenLogprob(1, text, -0.5, 1, text.encode()))

    def piece(text: str, *parts: Part, ending: Ending | None = None) -> Piece:
        return Piece(Delta(logprobs=(token(text),)), list(parts), 0, ending)

    events, _ = streamed(
        [
            piece("Hm", Thought("Hm")),
            piece("Lo", "Lo"),
            piece("o"),
            piece("k", "ok"),
            piece("<call>", CALL),
            piece("!", "!"),
            piece("<end>", ending=Ending("stop")),
        ],
        include=["message.output_text.logprobs"],
    )
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[one["token"] for one in event["logprobs"]] for event in deltas] == [
        ["Lo"],
        ["o", "k"],
        ["!"],
    ]
    said = [item for item in events[-1]["response"]["output"] if item["type"] == "message"]
    tokens = [[one["token"] for one in item["content"][0]["logprobs"]] for item in said]
    assert tokens == [["Lo", "o", "k"], ["!", "<end>"]]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 100])
def test_logprobs_are_those_of_the_text_however_many_tokens_come_at_a_time(num_tokens: int) -> None:
    thoughts = [b"<think>", b"One ", b"thing", b"\n", b"</think>", b"\n\n"]
    said = [b"t", b"h", b"\xc3", b"\xa9", b".", b"<end>"]
    tokens = [
        TokenLogprobs(TokenLogprob(1, token.decode(errors="replace"), -0.5, 1, token))
        for token in (*thoughts, *said)
    ]
    reader = AnswerReader(reader=ThinkingReader(("<think>", "</think>")))
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = []
    for at in range(0, len(tokens), num_tokens):
        come = tokens[at : at + num_tokens]
        ended = "stop" if come[-1] is tokens[-1] else None
        utf8 = b"".join(one.chosen.utf8 or b"" for one in come).removesuffix(b"<end>")
        pieces.append(reader.push(Delta(decoder.decode(utf8), ended, logprobs=tuple(come))))
    events, _ = streamed(pieces, include=["message.output_text.logprobs"])
    (message,) = (one for one in events[-1]["response"]["output"] if one["type"] == "message")
    (part,) = message["content"]
    assert part["text"] == "thé."
    assert [bytes(one["bytes"]) for one in part["logprobs"]] == said


def test_the_items_of_an_answer_are_messages_again() -> None:
    _, (kept,) = streamed(pieces([Thought("Hm."), "Look:", CALL]))
    found = messages_of_output(item.model_dump() for item in kept.output)
    sent_back = messages(*json.loads(kept.model_dump_json())["output"])
    assert found == sent_back
    (message,) = found
    assert message["reasoning_content"] == "Hm." and message["content"] == "Look:"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": "é"}


# --- what is kept --------------------------------------------------------------------------------


def kept_response(id: str, num_chars: int = 0) -> Kept:
    messages = [{"role": "user", "content": "x" * num_chars}]
    return Kept.of(id, b"{}", messages, {f"item of {id}": {"id": f"item of {id}"}})


@pytest.mark.parametrize("by_item", [False, True])
def test_what_was_used_least_recently_goes_first(by_item: bool) -> None:
    memory = ResponseMemory(2, 10**6)
    for id in "ab":
        memory.keep("", kept_response(id))
    used = memory.find_item("", "item of a") if by_item else memory.find("", "a")
    assert used is not None
    memory.keep("", kept_response("c"))
    assert memory.find("", "b") is None and memory.find_item("", "item of b") is None
    assert memory.find("", "a") is not None and memory.find_item("", "item of a") is not None
    assert memory.remove("", "a") and not memory.remove("", "a")
    assert len(memory) == 1


def test_a_response_that_is_too_large_drives_none_away() -> None:
    memory = ResponseMemory(9, 1000)
    memory.keep("", kept_response("a"))
    memory.keep("", kept_response("b", num_chars=1000))
    assert memory.find("", "a") is not None and memory.find("", "b") is None
    nothing = ResponseMemory(0, 1000)
    nothing.keep("", kept_response("a"))
    assert len(nothing) == 0


@given(
    st.lists(st.tuples(st.sampled_from(["k", "l"]), st.sampled_from("abcdef"), st.integers(0, 400)))
)
def test_the_bounds_hold(steps: list[tuple[str, str, int]]) -> None:
    memory = ResponseMemory(3, 1000)
    for label, id, num_chars in steps:
        if num_chars % 7 == 0:
            memory.remove(label, id)
        elif memory.find(label, id) is None:
            response = kept_response(id, num_chars)
            memory.keep(label, response)
            found = memory.find(label, id)
            assert found is None or found == response
        assert len(memory) <= 3 and 0 <= memory.num_bytes <= 1000
    ids = [(label, id) for label in "kl" for id in "abcdef"]
    left = [one for label, id in ids if (one := memory.find(label, id)) is not None]
    assert len(left) == len(memory)
    assert sum(one.num_bytes for one in left) == memory.num_bytes
    for label, id in ids:
        assert (memory.find_item(label, f"item of {id}") is None) is (
            memory.find(label, id) is None
        )
