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
from tests.properties.corpus import kept


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


NUMBERS = st.lists(st.integers(0, 10_000), max_size=24)
"""Token ids, once the vocabulary is known."""
CUTS = st.lists(st.integers(0, 24), max_size=6)


def ids_of(numbers: list[int], vocabulary: Vocabulary) -> list[int]:
    # two more than there are tokens: a model's last rows often have none
    return [number % (len(vocabulary) + 2) for number in numbers]


def chunks_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted(min(cut, len(ids)) for cut in cuts)
    return [ids[a:b] for a, b in zip([0, *places], [*places, len(ids)], strict=True)]


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
@kept("numbers", "cuts")
@given(numbers=NUMBERS, cuts=CUTS)
def test_chunks_add_up_to_what_the_library_decodes(
    kind: str, numbers: list[int], cuts: list[int]
) -> None:
    tokenizer, vocabulary = loaded(kind)
    ids = ids_of(numbers, vocabulary)
    text, count, _ = in_chunks(TextStream(vocabulary), chunks_of(ids, cuts))
    assert text == tokenizer.decode(ids, skip_special_tokens=True)
    assert count == len(ids)
    spelled, count, _ = in_chunks(
        TextStream(vocabulary, skip_special_tokens=False), chunks_of(ids, cuts)
    )
    assert spelled == tokenizer.decode(ids, skip_special_tokens=False)
    assert count == len(ids)


@kept("parts", "cuts")
@given(parts=st.lists(st.integers(0, 10_000) | st.text(max_size=3), max_size=12), cuts=CUTS)
def test_byte_fallback_equals_the_library_wherever_bytes_are_utf8(
    parts: list[int | str], cuts: list[int]
) -> None:
    """Parts are indices of words, or strings whose bytes become ids: id n < 256 is byte n."""
    tokenizer, vocabulary = loaded("sentence_piece")
    ids: list[int] = []
    for part in parts:
        words = len(vocabulary) + 2 - 256
        ids += part.encode() if isinstance(part, str) else [256 + part % words]
    text, _, _ = in_chunks(TextStream(vocabulary), chunks_of(ids, cuts))
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", list(KINDS))
@kept("numbers", "cuts", "stops", "min_tokens", "silent", "continues")
@given(
    numbers=NUMBERS,
    cuts=CUTS,
    stops=STOPS,
    min_tokens=st.integers(0, 8),
    silent=st.lists(st.integers(0, 10_000), max_size=2),
    continues=st.booleans(),
)
def test_chunking_changes_nothing(
    kind: str,
    numbers: list[int],
    cuts: list[int],
    stops: list[str],
    min_tokens: int,
    silent: list[int],
    continues: bool,
) -> None:
    _, vocabulary = loaded(kind)
    ids = ids_of(numbers, vocabulary)
    options: dict[str, Any] = {
        "stop_strings": stops,
        "min_tokens": min_tokens,
        "silent_ids": ids_of(silent, vocabulary),
        "continues": continues,
    }
    whole = in_chunks(TextStream(vocabulary, **options), [ids])
    assert in_chunks(TextStream(vocabulary, **options), chunks_of(ids, cuts)) == whole
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
@kept("numbers", "cuts", "stops", "min_tokens")
@given(numbers=NUMBERS, cuts=CUTS, stops=STOPS, min_tokens=st.integers(0, 8))
def test_stop_strings_match_as_by_brute_force(
    kind: str, numbers: list[int], cuts: list[int], stops: list[str], min_tokens: int
) -> None:
    _, vocabulary = loaded(kind)
    ids = ids_of(numbers, vocabulary) or [0]
    stream = TextStream(vocabulary, stop_strings=stops, min_tokens=min_tokens)
    found = in_chunks(stream, chunks_of(ids, cuts))
    assert found == expected_match(vocabulary, ids, stops, min_tokens)


@kept("text", "stops")
@given(text=st.text(max_size=40), stops=STOPS)
def test_no_more_is_held_back_than_may_begin_a_match(text: str, stops: list[str]) -> None:
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
