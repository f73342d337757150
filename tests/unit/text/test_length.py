"""Texts that are too long for the context are refused early, but none that would fit."""

from __future__ import annotations

import sys
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import InvalidRequest
from minisgl_backend.text.length import LengthCheck, Room, longest_token_bytes
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.generation import MessagesPrompt, TextPrompt, TokenPrompt
from tests.fakes import vocabularies

CONTEXT = 50
DEMO = PromptEncoder.load(DEMO_MODEL)
SHORT = PromptEncoder.load(DEMO_MODEL, context=CONTEXT)
PIECES = [piece.decode("utf-8", "ignore") for piece in DEMO.vocabulary.pieces]


def longest(tokenizer: Tokenizer) -> int | None:
    return longest_token_bytes(tokenizer, Vocabulary.of(tokenizer))


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=30), min_size=1, max_size=200))
def test_what_fits_is_never_refused(parts: list[str]) -> None:
    text = "".join(parts) or "x"
    whole = DEMO.encode(TextPrompt(text))
    try:
        assert SHORT.encode(TextPrompt(text)).tolist() == whole.tolist()
    except InvalidRequest as error:
        assert "does not fit the context of 50" in str(error)
        assert len(whole) > CONTEXT


@pytest.mark.parametrize(
    "text",
    ["lorem ipsum dolor sit amet " * 250_000, "a" * 6_700_000, " " * 6_700_000, "é\n" * 2_000_000],
)
def test_a_text_of_megabytes_is_not_tokenized(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        """Lets only short texts through."""

        def encode_batch(self, texts: list[str], **options: Any) -> Any:
            assert len(texts[0]) <= 8 * CONTEXT
            return DEMO._plain.encode_batch(texts, **options)

    monkeypatch.setattr(SHORT, "_plain", Small())
    with pytest.raises(InvalidRequest, match=r"prompt of .* does not fit the context of 50"):
        SHORT.encode(TextPrompt(text))


def test_a_beginning_tells_of_many_tokens() -> None:
    """Bytes reveal nothing if a tokenizer's tokens may stand for any number of them."""
    tokenizer = vocabularies.words()
    check, room = LengthCheck(tokenizer, Vocabulary.of(tokenizer)), Room.of(CONTEXT, None)
    text = "alpha beta " * 1000
    with pytest.raises(InvalidRequest, match="of more than 56 tokens does not fit the context of"):
        check.check(tokenizer, text, len(text), room)
    one_token = "x" * 100_000
    check.check(tokenizer, one_token, len(one_token), room)


def test_tokens_and_chats_that_are_too_long() -> None:
    ids = np.zeros(CONTEXT + 1, dtype=np.int32)
    with pytest.raises(InvalidRequest, match="prompt of 51 tokens does not fit the context of 50"):
        SHORT.encode(TokenPrompt(ids))
    assert len(SHORT.encode(TokenPrompt(ids[1:]))) == CONTEXT
    with pytest.raises(InvalidRequest, match="bytes does not fit the context of 50"):
        SHORT.encode(
            SHORT.render_chat(MessagesPrompt('[{"role": "user", "content": "%s"}]' % ("a" * 5000)))
        )


def test_the_pages_may_have_less_room_than_the_context() -> None:
    ids = np.zeros(20, dtype=np.int32)
    assert len(SHORT.encode(TokenPrompt(ids), most_tokens=20)) == 20
    with pytest.raises(InvalidRequest) as caught:
        SHORT.encode(TokenPrompt(ids), most_tokens=19)
    told = "prompt of 20 tokens does not fit the KV cache, which has room for 19"
    assert str(caught.value) == told
    with pytest.raises(InvalidRequest, match="bytes does not fit the KV cache, which has room for"):
        SHORT.encode(TextPrompt("a" * 600), most_tokens=19)
    with pytest.raises(InvalidRequest, match="does not fit the context of 50"):
        SHORT.encode(TokenPrompt(np.zeros(CONTEXT + 1, dtype=np.int32)), most_tokens=CONTEXT)


def test_the_longest_token() -> None:
    assert longest(vocabularies.byte_level()) == len("two words")
    assert longest(vocabularies.sentence_piece()) == len("日本 ".encode())
    assert longest(vocabularies.metaspace()) is None, "what is not known is one token, or none"
    assert longest(vocabularies.words()) is None
    composing = vocabularies.byte_level()
    composing.normalizer = normalizers.Sequence([normalizers.NFC()])
    assert longest(composing) == 4 * len("two words")
    for spoil in (
        lambda it: it.add_tokens([AddedToken("greedy", rstrip=True)]),
        lambda it: setattr(it, "normalizer", normalizers.StripAccents()),
        lambda it: setattr(it, "normalizer", normalizers.Replace("aaaa", "a")),
        lambda it: setattr(it, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
    ):
        tokenizer = vocabularies.byte_level()
        spoil(tokenizer)
        assert longest(tokenizer) is None


def test_how_much_composing_shrinks() -> None:
    """A character is composed of parts, and a part may also be spelled as a longer character."""
    characters = [
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.decomposition(chr(code))[:1] not in ("", "<") or 0xAC00 <= code < 0xD7A4
    ]
    spelled: dict[str, int] = {}
    for char in characters:
        parts = unicodedata.normalize("NFD", char)
        if len(parts) == 1:
            spelled[parts] = max(spelled.get(parts, 0), len(char.encode()))

    def shrinks(char: str) -> float:
        parts = unicodedata.normalize("NFD", char)
        before = sum(max(spelled.get(part, 0), len(part.encode())) for part in parts)
        return before / len(unicodedata.normalize("NFC", char).encode())

    assert 3 < max(map(shrinks, characters)) <= 4
