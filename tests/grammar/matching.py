"""Grammars over the demo model's vocabulary, and the masks of answers that follow them."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

import minisgl_backend
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.grammar.matchers import AnswerState, Batch, Grammars, Matcher
from minisgl_backend.request import Grammar, GrammarKind, SamplingParams
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer_files import load_vocabulary

FOLDER: Final = Path(minisgl_backend.__file__).parent / "demo_model"
VOCABULARY: Final = load_vocabulary(FOLDER)
EOS: Final = 0
NUM_EMBEDDINGS: Final = len(VOCABULARY) + 40  # as models pad them
MOST_TOKENS: Final = 120


def compiled(grammars: Grammars, kind: str, source: Any, **more: Any) -> Matcher:
    """A matcher of the grammar; raises what is wrong with it."""
    text = source if isinstance(source, str) else json.dumps(source)
    found: list[object] = []
    ready = threading.Event()

    def done(outcome: object) -> None:
        found.append(outcome)
        ready.set()

    section = {
        name: more.pop(name) for name in ("begins_after", "opened_by", "channels") if name in more
    }
    grammar = Grammar(GrammarKind(kind), text, **section)
    grammars.compile(SamplingParams(grammar=grammar, **more), done)
    assert ready.wait(60)
    if isinstance(found[0], MiniSGLError):
        raise found[0]
    assert isinstance(found[0], Matcher)
    return found[0]


def allowed(grammars: Grammars, matcher: Matcher) -> list[int]:
    """The tokens of a mask."""
    masks = np.empty((1, grammars.num_words), np.int32)
    assert grammars.fill(Batch([matcher]), masks).result() == {}
    bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
    assert not bits[len(VOCABULARY) : NUM_EMBEDDINGS].any()
    tokens: list[int] = np.flatnonzero(bits[: len(VOCABULARY)]).tolist()
    return tokens


def follow(grammars: Grammars, matcher: Matcher, text: str) -> bool:
    """Whether the text is allowed, using the longest allowed tokens, and may end there.

    If only one text may follow, only its usual tokens are allowed.
    """
    rest = text.encode()
    while rest:
        options = [token for token in allowed(grammars, matcher) if VOCABULARY.pieces[token]]
        options = [token for token in options if rest.startswith(VOCABULARY.pieces[token])]
        if not options:
            return False
        token = max(options, key=lambda option: len(VOCABULARY.pieces[option]))
        rest = rest[len(VOCABULARY.pieces[token]) :]
        if grammars.advance(Batch([matcher]), [token]) == {0: AnswerState.COMPLETE}:
            return not rest
    return EOS in allowed(grammars, matcher)


def walk(grammars: Grammars, matcher: Matcher, chance: random.Random) -> str | None:
    """A text of random allowed tokens, shorter ones more often; None if it does not end."""
    tokens: list[int] = []
    for _ in range(MOST_TOKENS):
        options = allowed(grammars, matcher)
        assert options, "nothing may follow, though the answer is not complete"
        if EOS in options and chance.random() < 0.5:
            token = EOS
        else:
            few = chance.sample(options, min(4, len(options)))
            token = min(few, key=lambda option: len(VOCABULARY.pieces[option]))
        tokens.append(token)
        if grammars.advance(Batch([matcher]), [token]) == {0: AnswerState.COMPLETE}:
            return TextStream(VOCABULARY).push(tokens, final=True).text
    return None
