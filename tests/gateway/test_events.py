"""Deltas become events that the official client's own types accept."""

from __future__ import annotations

import json
from typing import Any

import pytest
from minisgl_client.answer import Delta, TokenLogprob, TokenLogprobs
from minisgl_gateway.completions.answers import Echo, Heading
from minisgl_gateway.completions.events import ChatWriter, CompletionWriter, usage_event
from minisgl_gateway.counts import Counts
from minisgl_gateway.dialects.choice import dialect_of
from minisgl_gateway.errors import ApiError
from minisgl_gateway.parts import AnswerReader, Ending, Piece
from minisgl_gateway.renderers import Writer
from minisgl_gateway.thinking import Thought
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

HEADING = Heading("id-1", 'a "model"', 1)
STRANGE = 'quotes " and \\ and \u2028 \u0085 \r\n\t 🦊 \x00 </script>'


def events(data: bytes) -> list[Any]:
    """The JSON of each event; the framing must allow no client to split it differently."""
    assert data.isascii()
    text = data.decode()
    assert text.splitlines() == text.split("\n")[:-1]
    parts = text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def told(writer: Writer, *deltas: Delta, reader: AnswerReader | None = None) -> list[Any]:
    """What a writer makes of an answer's deltas."""
    reader = reader or AnswerReader()
    return events(b"".join([writer.push(reader.push(delta)) for delta in deltas]))


def logprobs(text: str, rank: int = 1) -> TokenLogprobs:
    chosen = TokenLogprob(7, text, -0.5 * rank, rank)
    return TokenLogprobs(chosen, (TokenLogprob(8, "other", -1.5, 3 - rank),))


def test_a_chat_is_opened_continued_and_ended() -> None:
    writer = ChatWriter(HEADING, 2)
    chunks = told(writer, Delta(text=STRANGE), Delta(text="!", finish_reason="stop"))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert chunk["model"] == HEADING.model
        assert chunk["choices"][0]["index"] == 2
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": STRANGE},
        {"content": "!"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["stop"]


def test_deltas_without_text_make_no_events() -> None:
    chat = ChatWriter(HEADING, 0)
    assert len(told(chat, Delta())) == 1  # the role
    assert chat.push(AnswerReader().push(Delta())) == b""
    assert CompletionWriter(HEADING, 0).push(AnswerReader().push(Delta())) == b""


def test_usage_is_null_until_it_is_told() -> None:
    (chunk,) = told(CompletionWriter(HEADING, 0, usage=True), Delta(text="x"))
    assert chunk["usage"] is None
    (chunk,) = told(CompletionWriter(HEADING, 0), Delta(text="x"))
    assert "usage" not in chunk
    counts = Counts()
    for reason in (None, "stop"):
        delta = Delta(
            finish_reason=reason, num_input_tokens=5, num_output_tokens=2, num_cached_tokens=4
        )
        counts.add(delta, prompt=True, num_thought_tokens=1)
        counts.add(delta, prompt=False)
    (chunk,) = events(usage_event(HEADING, "text_completion", counts))
    assert chunk["choices"] == []
    assert chunk["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_usage_so_far_is_told_by_every_chunk() -> None:
    """It is that of the chunk's own choice; the sum of all choices comes at the end."""
    counts: Any = {"num_input_tokens": 5, "num_cached_tokens": 4}
    deltas = [
        Delta(text="a", num_output_tokens=2, **counts),
        Delta(text="b", num_output_tokens=1, finish_reason="stop", **counts),
    ]
    for writer in (
        ChatWriter(HEADING, 0, continuous=True),
        CompletionWriter(HEADING, 0, continuous=True),
    ):
        chunks = told(writer, *deltas)
        assert chunks[0]["usage"]["prompt_tokens"] == 5
        assert chunks[0]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
        assert chunks[0]["usage"]["completion_tokens"] == 2
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert chunks[-1]["usage"]["total_tokens"] == 8


def test_usage_so_far_tells_the_tokens_of_thoughts() -> None:
    writer = ChatWriter(HEADING, 0, continuous=True)
    pieces = [
        Piece(Delta(num_output_tokens=2), [Thought("Hm.")], num_thought_tokens=2),
        Piece(Delta(num_output_tokens=1), ["Yes"], ending=Ending("stop")),
    ]
    chunks = [chunk for piece in pieces for chunk in events(writer.push(piece))]
    assert [chunk["usage"]["completion_tokens"] for chunk in (chunks[0], chunks[-1])] == [2, 3]
    for chunk in chunks:
        assert chunk["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_the_call_of_a_function_in_the_older_form() -> None:
    writer = ChatWriter(HEADING, 0, call_form="function_call")
    text = 'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}'
    end = Delta(finish_reason="stop", stop_reason="</tool_call>")
    chunks = told(
        writer,
        Delta(text=text),
        end,
        reader=AnswerReader(dialect_of(None).reader(), own_stop="</tool_call>"),
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Well."},
        {"function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


def test_a_completion_ends_with_its_last_text() -> None:
    writer = CompletionWriter(HEADING, 0, echo=Echo("Prompt. "))
    chunks = told(writer, Delta(text="a"), Delta(text="b", finish_reason="length"))
    Completion.model_validate(chunks[-1], strict=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Prompt. a", "b"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]


def test_logprobs_come_with_the_tokens_text_or_not() -> None:
    writer = ChatWriter(HEADING, 0, num_logprobs=1)
    half = Delta(logprobs=(logprobs("\ufffd"),))
    rest = Delta(text="🦊", logprobs=(logprobs("\ufffd", rank=2),), finish_reason="stop")
    found = [chunk["choices"][0]["logprobs"] for chunk in told(writer, half, rest)]
    assert [one and len(one["content"]) for one in found] == [None, 1, 1, None]
    assert found[1]["content"][0]["bytes"] is None
    assert [top["token"] for top in found[1]["content"][0]["top_logprobs"]] == ["\ufffd"]
    assert [top["token"] for top in found[2]["content"][0]["top_logprobs"]] == ["other"]


def test_offsets_of_a_completion_go_on() -> None:
    writer = CompletionWriter(HEADING, 0, num_logprobs=1)
    first = Delta(text="ab", logprobs=(logprobs("a"), logprobs("b", rank=2)))
    last = Delta(text="c", logprobs=(logprobs("c"),), finish_reason="stop")
    found = [chunk["choices"][0]["logprobs"] for chunk in told(writer, first, last)]
    assert [one["text_offset"] for one in found] == [[0, 1], [2]]
    assert found[0]["tokens"] == ["a", "b"]
    assert found[0]["top_logprobs"] == [{"a": -0.5}, {"b": -1.0, "other": -1.5}]


def test_parts_of_a_character_begin_where_it_does() -> None:
    """Also for one that comes in two pieces, and for one that is never completed."""

    def part(utf8: bytes) -> TokenLogprobs:
        return TokenLogprobs(TokenLogprob(7, utf8.decode(errors="replace"), -0.5, 1, utf8))

    fox, eacute = "🦊".encode(), "é".encode()
    writer = CompletionWriter(HEADING, 0, num_logprobs=0)
    first = Delta(text="a", logprobs=(part(b"a"), part(fox[:1]), part(fox[1:3])))
    second = Delta(text="🦊b", logprobs=(part(fox[3:]), part(b"b"), part(eacute[:1])))
    last = Delta(text="\ufffdc é", logprobs=(part(b"c "), part(eacute)), finish_reason="stop")
    found = [chunk["choices"][0]["logprobs"] for chunk in told(writer, first, second, last)]
    assert [one["text_offset"] for one in found] == [[0, 1, 1], [1, 2, 3], [4, 6]]
    whole = ChatWriter(HEADING, 0, num_logprobs=0)
    chunks = told(whole, Delta(text="🦊", logprobs=(part(fox[:2]), part(fox[2:]))))
    content = chunks[-1]["choices"][0]["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [list(fox[:2]), list(fox[2:])]


@pytest.mark.parametrize(
    ("first_token", "text", "offsets"),
    [("<s>", "ab c", [0, 0, 4]), ("ab", "ab c", [0, 2, 4]), ("\ufffd", "é c", [0, 1, 3])],
)
def test_offsets_behind_an_echo(first_token: str, text: str, offsets: list[int]) -> None:
    """A token before the text, such as one that begins each prompt, takes no space in it."""
    writer = CompletionWriter(HEADING, 0, num_logprobs=0, echo=Echo(text, first_token))
    second = logprobs(text if first_token == "<s>" else " c")
    scored = Delta(prompt_logprobs=(None, second))
    found = told(writer, scored, Delta(text="d", logprobs=(logprobs("d"),)))
    places = [offset for one in found for offset in one["choices"][0]["logprobs"]["text_offset"]]
    assert places == offsets


def test_the_likeliest_of_the_tokens_that_have_one_text() -> None:
    """Evaluation tools use the largest value to tell whether the token was the likeliest."""
    part = "\ufffd"
    likeliest, chosen, other = (
        TokenLogprob(8 + rank, text, -float(rank), rank)
        for rank, text in enumerate((part, part, "x"), 1)
    )
    writer = CompletionWriter(HEADING, 0, num_logprobs=3)
    (chunk,) = told(writer, Delta(logprobs=(TokenLogprobs(chosen, (likeliest, other)),)))
    found = chunk["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-2]
    assert found["top_logprobs"] == [{part: -1, "x": -3}]


@pytest.mark.parametrize(
    ("reason", "status"), [("timeout", 504), ("cancelled", 499), ("surprise", 500)]
)
def test_ends_that_openai_does_not_know_are_errors(reason: str, status: int) -> None:
    with pytest.raises(ApiError) as caught:
        AnswerReader().push(Delta(text="x", finish_reason=reason))
    assert caught.value.status == status
