"""Deltas of a stream: whole characters, stop strings, and which tokens count."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from minisgl_backend.errors import ConfigError
from minisgl_backend.text.detokenizer import TextDelta, TextStream
from minisgl_backend.text.stop import StopMatcher
from minisgl_backend.text.vocabulary import Vocabulary
from tests.fakes import vocabularies

BYTES = Vocabulary.of(vocabularies.byte_level())
MARKED = Vocabulary.of(vocabularies.sentence_piece())
META = Vocabulary.of(vocabularies.metaspace())


def ids(text: str) -> list[int]:
    return vocabularies.ids_of_bytes(BYTES, text)


def named(vocabulary: Vocabulary, *tokens: str) -> list[int]:
    return [list(vocabulary.names).index(token) for token in tokens]


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream(BYTES)
    assert [stream.push([i]).text for i in ids("é🎉!")] == ["", "é", "", "", "", "🎉", "!"]


def test_a_broken_character_comes_out_at_the_end() -> None:
    stream = TextStream(BYTES)
    assert stream.push(ids("a🎉")[:3]).text == "a"
    assert stream.push([], final=True).text == "\ufffd"
    stream = TextStream(BYTES)
    assert stream.push(ids("日")[:1]).text == ""
    assert stream.push(ids("a")).text == "\ufffda"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    special = named(BYTES, "<|end|>", "<|start|>")
    stream = TextStream(BYTES)
    assert stream.push([*ids("a"), *special, len(BYTES), *ids("b")]).text == "ab"
    assert TextStream(BYTES).push([*ids("a"), -len(BYTES) - 1, *ids("b")]).text == "ab"
    assert stream.push(named(BYTES, "<think>", "two words")).text == "<think>two words"


def test_special_tokens_are_spelled_out_but_for_those_that_end_the_request() -> None:
    start, end = named(BYTES, "<|start|>", "<|end|>")
    stream = TextStream(BYTES, skip_special_tokens=False, silent_ids=[end])
    assert stream.push([start, *ids("a"), end]) == TextDelta("<|start|>a", 3)


def test_a_stop_string_matches_special_tokens_that_are_spelled_out() -> None:
    (start,) = named(BYTES, "<|start|>")
    told = TextStream(BYTES, stop_strings=["t|>b"], skip_special_tokens=False)
    assert told.push([*ids("a"), start, *ids("bc")]) == TextDelta("a<|star", 3, "t|>b")
    untold = TextStream(BYTES, stop_strings=["t|>b"])
    assert untold.push([*ids("a"), start, *ids("bc")], final=True) == TextDelta("abc", 4)


def test_silent_ids_have_no_text_but_count() -> None:
    delta = TextStream(BYTES, silent_ids=ids("b")).push(ids("abc"))
    assert delta == TextDelta("ac", 3)


def test_sentence_piece_drops_one_space_at_the_start() -> None:
    paris = named(MARKED, "▁Paris")
    assert TextStream(MARKED).push(paris * 2).text == "Paris Paris"
    assert TextStream(MARKED, continues=True).push(paris).text == " Paris"
    stream = TextStream(MARKED)
    assert [stream.push([i]).text for i in named(MARKED, "▁▁", "▁", "a")] == [" ", " ", "a"]


def test_metaspace_drops_the_marks_of_the_first_token() -> None:
    stream = TextStream(META)
    first = [*named(META, "<s>"), 10**6]
    assert stream.push(first).text == ""
    assert [stream.push([i]).text for i in named(META, "▁▁", "▁a▁b")] == ["", " a b"]
    assert TextStream(META).push(named(META, "▁a▁b", "▁a")).text == "ab a"
    assert TextStream(META, continues=True).push(named(META, "▁a")).text == " a"


def test_byte_fallback_gives_up_broken_bytes_only() -> None:
    broken = [*"é".encode(), 0xFF, *"é".encode()]  # id n is byte n
    assert TextStream(MARKED).push(broken, final=True).text == "é\ufffdé"
    assert TextStream(MARKED).push(named(MARKED, "<0xE6>", "a")).text == "\ufffda"


@pytest.mark.parametrize("cut", range(6))
def test_a_stop_string_matches_across_chunks(cut: int) -> None:
    stream = TextStream(BYTES, stop_strings=("stop",))
    tokens = ids("ab stop it")
    first = stream.push(tokens[: 2 + cut])
    delta = first if first.stop else stream.push(tokens[2 + cut :])
    text = delta.text if first.stop else first.text + delta.text
    assert text == "ab "
    assert delta.stop == stream.stop == "stop"
    assert first.num_tokens + (0 if first.stop else delta.num_tokens) == 7


def test_only_what_may_begin_a_match_is_held_back() -> None:
    stream = TextStream(BYTES, stop_strings=("aab", "xyz"))
    deltas = [stream.push([i]).text for i in ids("xyaaac")]
    assert deltas == ["", "", "xy", "", "a", "aac"]
    assert stream.push(ids("xy"), final=True) == TextDelta("xy", 2)


def test_the_match_that_ends_first_wins_then_the_longest() -> None:
    whole = BYTES.pieces.index(b" Paris")
    delta = TextStream(BYTES, stop_strings=("ris", "Pari", "ari")).push([whole])
    assert (delta.text, delta.stop) == (" ", "Pari")


def test_a_match_does_not_count_before_min_tokens() -> None:
    tokens = ids("xx.x.")
    delta = TextStream(BYTES, stop_strings=("x.",), min_tokens=3).push(tokens)
    assert delta == TextDelta("xx.", 5, "x.")
    delta = TextStream(BYTES, stop_strings=("x.",), min_tokens=2).push(tokens)
    assert delta == TextDelta("x", 3, "x.")
    delta = TextStream(BYTES, stop_strings=("x.",), min_tokens=5).push(tokens, final=True)
    assert delta == TextDelta("xx.x.", 5)


def test_a_match_may_begin_before_min_tokens() -> None:
    stream = TextStream(BYTES, stop_strings=("ab",), min_tokens=1)
    assert stream.push(ids("a")).text == ""
    assert stream.push(ids("b")) == TextDelta("", 1, "ab")


def test_a_broken_last_character_may_complete_a_match() -> None:
    half = ids("🎉")[:2]
    stream = TextStream(BYTES, stop_strings=("a\ufffd",))
    assert stream.push([*ids("ba"), *half], final=True) == TextDelta("b", 4, "a\ufffd")
    exempt = TextStream(BYTES, stop_strings=("a\ufffd",), min_tokens=4)
    assert exempt.push([*ids("ba"), *half], final=True) == TextDelta("ba\ufffd", 4)


def test_nothing_may_follow_a_stop() -> None:
    stream = TextStream(BYTES, stop_strings=("a",))
    stream.push(ids("a"))
    with pytest.raises(AssertionError):
        stream.push(ids("b"))


def test_the_matcher_is_linear_in_hostile_text() -> None:
    """Every step either reads a character or falls back, at most once per character read."""
    matcher = StopMatcher(("a" * 1000 + "b",))
    state, read = matcher.search(0, "a" * 100_000)
    assert read == 100_000
    assert matcher.held[state] == 1000
    assert matcher.matched[state] is None


def test_names_of_tokens() -> None:
    assert vocabularies.token_text(BYTES, ids("é")[0]) == "\ufffd"
    assert vocabularies.token_text(BYTES, BYTES.pieces.index(b" Paris")) == " Paris"
    assert vocabularies.token_text(BYTES, named(BYTES, "<|end|>")[0]) == "<|end|>"
    assert vocabularies.token_text(BYTES, -1) == vocabularies.token_text(BYTES, 10**6) == ""


def test_ids_may_have_holes() -> None:
    vocabulary = Vocabulary(["a", None, "b"], frozenset(), None)
    assert len(vocabulary) == 3
    assert TextStream(vocabulary).push([0, 1, 2]).text == "a b"
    assert not vocabulary.has_text(1)
    assert vocabularies.token_text(vocabulary, 1) == ""


def test_metaspace_without_a_prefix_keeps_its_marks() -> None:
    decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    vocabulary = Vocabulary(["▁a"], frozenset(), decoder)
    assert vocabulary.first_pieces is None
    assert TextStream(vocabulary).push([0]).text == " a"


def test_what_only_looks_like_a_byte_is_text() -> None:
    vocabulary = Vocabulary(["<0xZZ>", "<0x41>"], frozenset(), {"type": "ByteFallback"})
    assert TextStream(vocabulary).push([0, 1]).text == "<0xZZ>A"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
    ],
)
def test_a_decoder_that_is_not_known_fails_the_load(decoder: Any) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match="the tokenizer's decoder"):
        Vocabulary.of(tokenizer)
