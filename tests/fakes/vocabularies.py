"""Small tokenizers of every kind that language models use, built by the tokenizers library.

The vocabularies make characters span tokens: single bytes, halves of characters, marks for spaces
in odd places.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minisgl_backend.request import TokenId
from minisgl_backend.text.vocabulary import Vocabulary

WORDS = ["a", "b", "ab", "Paris", "é", "日本", "東", "🎉", " ", "  ", "!", "stop", "\n", "\ufffd"]


def token_text(vocabulary: Vocabulary, token_id: TokenId) -> str:
    """The text of one token by itself; half a character is U+FFFD."""
    return vocabulary.token_bytes(token_id).decode("utf-8", "replace")


def ids_of_bytes(vocabulary: Vocabulary, text: str) -> list[TokenId]:
    """One token per byte."""
    return [vocabulary.pieces.index(bytes([byte])) for byte in text.encode()]


def byte_level() -> Tokenizer:
    """Byte-level BPE as GPT-2 spells it: all bytes, and some longer pieces, some of them broken."""
    spell = _byte_spelling()
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [word.encode() for word in WORDS if len(word.encode()) > 1]
    pieces += ["日".encode()[:2], "🎉".encode()[1:], b" \xe6", b"\xc3\xa9\xe6", b" Paris"]
    vocab = {"".join(spell[byte] for byte in piece): n for n, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("two words")])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Llama 2's kind: marks for spaces, byte fallback, one space stripped at the start."""
    tokenizer = Tokenizer(models.BPE(vocab=_marked_vocab(), merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """SentencePiece as the Metaspace decoder reads it: the first token loses its marks."""
    vocab = {word: n for n, word in enumerate(["▁", "▁▁", "▁a▁b", *WORDS, *_marked(WORDS)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def words() -> Tokenizer:
    """Whole words, joined by spaces: no decoder at all."""
    vocab = {word: n for n, word in enumerate(["alpha", "beta", "日本", "stop", "[unk]"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def _marked(words: list[str]) -> list[str]:
    return [f"▁{word}" for word in words if not word.isspace()]


def _marked_vocab() -> dict[str, int]:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁▁", *_marked(WORDS)]
    pieces += [word for word in WORDS if not word.isspace()]
    return {piece: n for n, piece in enumerate(dict.fromkeys(pieces))}


def _byte_spelling() -> dict[int, str]:
    """Byte -> the character that GPT-2 spells it with, found by asking the library."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = {ord(char): char for char in alphabet if ord(char) < 256}
    others = iter(char for char in alphabet if ord(char) >= 256)
    return {byte: plain.get(byte) or next(others) for byte in range(256)}
