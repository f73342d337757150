"""Any tokens in any chunking give the text of one decode, and the same stop match."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.vocabulary import Vocabulary
from tests.fakes import vocabularies


def demo() -> Tokenizer:
    return Tokenizer.from_file(f"{DEMO_MODEL}/tokenizer.json")


KINDS = {
    "byte_level": vocabularies.byte_level,
    "sentence_piece": vocabularies.sentence_piece,
    "metaspace": vocabularies.metaspace,
    "words": vocabularies.words,
    "demo": demo,
}
EXACT = [name for name in KINDS if name != "sentence_piece"]
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["a", "ab", "b a", "Paris", "é", "日本", "本日", "\ufffd", "stop", "aab"]),
        st.text("ab 日é", min_size=1, max_size=4),
    ),
    max_size=3,
)


@cache
def loaded(kind: str) -> tuple[Tokenizer, Vocabulary]:
    make: Callable[[], Tokenizer] = KINDS[kind]
    tokenizer = make()
    return tokenizer, Vocabulary.of(tokenizer)


def chunks_of(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def draw_ids(data: st.DataObject, vocabulary: Vocabulary) -> list[int]:
    # Two more than there are: a model's last rows often have no token.
    ids: list[int] = data.draw(st.lists(st.integers(0, len(vocabulary) + 1), max_size=24))
    return ids


def in_chunks(stream: TextStream, chunks: list[list[int]]) -> tuple[str, int, str | None]:
    """All text, the number of tokens that count, and the stop string that matched."""
    text, count = "", 0
    for index, chunk in enumerate(chunks):
        delta = stream.push(chunk, final=index == len(chunks) - 1)
        text += delta.text
        count += delta.num_tokens
        if delta.stop is not None:
            return text, count, delta.stop
    return text, count, None


@pytest.mark.parametrize("kind", EXACT)
@given(data=st.data())
def test_chunks_add_up_to_what_the_library_decodes(kind: str, data: st.DataObject) -> None:
    tokenizer, vocabulary = loaded(kind)
    ids = draw_ids(data, vocabulary)
    text, count, _ = in_chunks(TextStream(vocabulary), chunks_of(data, ids))
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert count == len(ids)


@given(data=st.data())
def test_byte_fallback_equals_the_library_wherever_bytes_are_utf8(data: st.DataObject) -> None:
    tokenizer, vocabulary = loaded("sentence_piece")
    words = st.integers(256, len(vocabulary) + 1).map(lambda token_id: [token_id])
    characters = st.text(max_size=3).map(lambda text: list(text.encode()))  # id n is byte n
    parts = data.draw(st.lists(st.one_of(words, characters), max_size=12))
    ids = [token_id for part in parts for token_id in part]
    text, _, _ = in_chunks(TextStream(vocabulary), chunks_of(data, ids))
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", list(KINDS))
@given(data=st.data())
def test_chunking_changes_nothing(kind: str, data: st.DataObject) -> None:
    _, vocabulary = loaded(kind)
    ids = draw_ids(data, vocabulary)
    options: dict[str, Any] = {
        "stop_strings": data.draw(STOPS),
        "min_tokens": data.draw(st.integers(0, 8)),
        "silent_ids": data.draw(st.lists(st.integers(0, len(vocabulary)), max_size=2)),
        "continues": data.draw(st.booleans()),
    }
    whole = in_chunks(TextStream(vocabulary, **options), [ids])
    assert in_chunks(TextStream(vocabulary, **options), chunks_of(data, ids)) == whole
    assert in_chunks(TextStream(vocabulary, **options), [[i] for i in ids] + [[]]) == whole


def expected_match(
    vocabulary: Vocabulary, ids: list[int], stops: list[str], min_tokens: int
) -> tuple[str, int, str | None]:
    """The same by brute force: every prefix of the text, checked against every stop string."""
    stream = TextStream(vocabulary)
    pieces = [stream.push([token_id]).text for token_id in ids]
    pieces[-1] += stream.push([], final=True).text
    text = ""
    for index, piece in enumerate(pieces):
        for char in piece:
            text += char
            ending = [stop for stop in stops if text.endswith(stop)]
            if ending and index >= min_tokens:
                longest = max(ending, key=len)
                return text[: len(text) - len(longest)], index + 1, longest
    return text, len(ids), None


@pytest.mark.parametrize("kind", list(KINDS))
@given(data=st.data())
def test_stop_strings_match_as_by_brute_force(kind: str, data: st.DataObject) -> None:
    _, vocabulary = loaded(kind)
    ids = draw_ids(data, vocabulary) or [0]
    stops, min_tokens = data.draw(STOPS), data.draw(st.integers(0, 8))
    stream = TextStream(vocabulary, stop_strings=stops, min_tokens=min_tokens)
    found = in_chunks(stream, chunks_of(data, ids))
    assert found == expected_match(vocabulary, ids, stops, min_tokens)


@given(st.text(max_size=40), STOPS, st.data())
def test_no_more_is_held_back_than_may_begin_a_match(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    _, vocabulary = loaded("byte_level")
    ids = [vocabulary.pieces.index(bytes([byte])) for byte in text.encode()]
    stream = TextStream(vocabulary, stop_strings=stops)
    shown = ""
    for count, token_id in enumerate(ids, 1):
        delta = stream.push([token_id])
        shown += delta.text
        if delta.stop is not None:
            return
        so_far = bytes(text.encode()[:count]).decode(errors="ignore")
        held = so_far[len(shown) :]
        begins = [
            so_far[start:]
            for start in range(len(so_far))
            if any(stop.startswith(so_far[start:]) for stop in stops)
        ]
        assert held == max(begins, key=len, default="")
