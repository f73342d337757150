"""What each token id adds to the text, as bytes: the decoder half of a tokenizer as one table.

Works for the decoders of language models: byte-level BPE (``ByteLevel``), SentencePiece as it is
converted for the tokenizers library (``Replace``, ``ByteFallback``, ``Fuse``, ``Strip``, or
``Metaspace``), and none at all (words). With them the text of a sequence is the concatenation of
what its tokens add, except at the very beginning; so it can be decoded piece by piece.

For byte-level BPE the text equals that of the tokenizers library for any ids. With byte fallback it
does wherever the bytes are valid UTF-8. In a run with broken bytes the library gives up all
characters of the run, while here only the broken ones become U+FFFD: this needs no waiting for the
end of the run. Must not know streams or stop strings (``detokenizer``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.bounds import MOST_VOCABULARY
from minisgl_backend.request import TokenId

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)


class Vocabulary:
    """Bytes by token id.

    ``pieces`` holds b"" for special tokens, ``spelled_pieces`` their names. ``first_pieces`` has
    the pieces of a first token, which differ if a decoder drops the space in front of the text;
    None if they do not. ``leading_spaces`` is the number of spaces that are dropped at the very
    start of the text.
    """

    __slots__ = ("first_pieces", "leading_spaces", "names", "pieces", "special", "spelled_pieces")

    def __init__(
        self,
        tokens: Sequence[str | None],
        special: frozenset[TokenId],
        decoder: dict[str, Any] | None,
    ) -> None:
        stages = _Stages(decoder)
        self.names = tokens
        """The tokens as the tokenizer spells them; None for an id with no token."""
        self.special = special
        self.leading_spaces = stages.leading_spaces
        self.pieces = [
            b"" if token is None or token_id in special else stages.piece(token)
            for token_id, token in enumerate(tokens)
        ]
        self.spelled_pieces = self.pieces.copy()
        for token_id in special:
            self.spelled_pieces[token_id] = stages.piece(tokens[token_id] or "")
        self.first_pieces: list[bytes] | None = None
        if stages.drops_first_marks:
            self.first_pieces = [
                b"" if token is None or token_id in special else stages.piece(token, first=True)
                for token_id, token in enumerate(tokens)
            ]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """The table of a tokenizer; raises ``ConfigError`` for a decoder that is not known, and for
        an id that no model can have: the table has a line for each id up to the last."""
        by_id = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
        last = max(by_id, default=-1)
        if last >= MOST_VOCABULARY:
            raise ConfigError(
                f"the tokenizer's token {by_id[last]!r} has the id {last}, which must be below "
                f"{MOST_VOCABULARY}"
            )
        tokens = [by_id.get(token_id) for token_id in range(last + 1)]
        added = tokenizer.get_added_tokens_decoder()
        special = frozenset(token_id for token_id, token in added.items() if token.special)
        return cls(tokens, special, json.loads(tokenizer.to_str())["decoder"])

    def __len__(self) -> int:
        return len(self.pieces)

    def check_fits(self, num_embeddings: int) -> None:
        """Raise ``ConfigError`` if a text can have tokens beyond the model's embeddings.

        Special tokens may lie beyond, as the padding of some checkpoints does: a request that
        spells one is refused.
        """
        behind = range(num_embeddings, len(self))
        beyond = [token_id for token_id in behind if self.names[token_id] is not None]
        if not beyond:
            return
        token = self.names[beyond[0]]
        message = (
            f"the tokenizer has {len(beyond)} tokens that the model, of {num_embeddings} "
            f"embeddings, does not know: the first is {token!r}, of id {beyond[0]}, the last has "
            f"id {beyond[-1]}"
        )
        if not self.special.issuperset(beyond):
            raise ConfigError(message)
        logger.warning("%s; they are special, and refused if a request spells them", message)

    def has_text(self, token_id: TokenId) -> bool:
        """Whether an id is that of a token that is not special."""
        return (
            0 <= token_id < len(self.names)
            and self.names[token_id] is not None
            and token_id not in self.special
        )

    def token_bytes(self, token_id: TokenId) -> bytes:
        """One token by itself: what it adds to a text; for a special token, its name."""
        if not 0 <= token_id < len(self.pieces):
            return b""
        if token_id in self.special:
            return (self.names[token_id] or "").encode()
        return self.pieces[token_id]


class _Stages:
    """A tokenizer's decoder, reduced to what it does to a single token."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.leading_spaces = 0
        self.drops_first_marks = False
        self._byte_level = False
        self._byte_fallback = False
        self._separator = ""
        self._replacements: list[tuple[str, str]] = []
        self._bytes = _byte_level_alphabet()
        fused = False
        if decoder is None:  # words, joined by a space
            self._separator, self.leading_spaces = " ", 1
        stages = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
        for stage in filter(None, stages):
            if fused and stage["type"] not in ("Fuse", "Strip"):
                raise ConfigError(
                    f"the tokenizer's decoder {stage['type']} after Fuse is not known"
                )
            fused = fused or stage["type"] == "Fuse"
            self._add(stage, fused)

    def _add(self, stage: dict[str, Any], fused: bool) -> None:
        kind = stage["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in stage["pattern"]:
            self._replacements.append((stage["pattern"]["String"], stage["content"]))
        elif kind == "Metaspace":
            self._replacements.append((stage["replacement"], " "))
            self.drops_first_marks = stage.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and fused and stage["content"] == " " and not stage["stop"]:
            self.leading_spaces = stage["start"]
        elif kind != "Fuse":
            raise ConfigError(f"the tokenizer's decoder {kind} is not known")

    def piece(self, token: str, *, first: bool = False) -> bytes:
        """What a token adds to the text."""
        if self._byte_level:
            try:
                return bytes([self._bytes[char] for char in token])
            except KeyError:  # an added token, which stands for itself
                return token.encode()
        for pattern, content in self._replacements:
            token = token.replace(pattern, "" if first and self.drops_first_marks else content)
        if self._byte_fallback and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return (self._separator + token).encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte, as GPT-2 spells bytes: printable ones are spelled as themselves, the
    others as the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + n): byte for n, byte in enumerate(others)}
