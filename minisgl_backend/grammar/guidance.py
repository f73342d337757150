"""llguidance's tokenizer, and its matchers with bounds on their work.

The engine and the processes that try grammars out (``vetting``) make both in the same way. Must not
know how a grammar is translated, or which request it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.request import TokenId

_TEXT: Final = r'[^"\\\x00-\x1F\x7F]'
_SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 30)),
    f"{_TEXT}+",
)
"""Parts of the vocabulary that most states of a grammar allow or forbid as a whole. The slices of
short texts are for strings that have room for only a few more characters: with them such a mask
takes half the time that it takes with llguidance's own slices."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """A tokenizer as llguidance needs it.

    ``definition`` is tokenizer.json, added tokens included; ids from there up to ``vocab_size`` are
    never allowed. ``special_tokens`` are those without a text; each of ``eos_token_ids`` is allowed
    exactly where the answer may end. If the model has none, a special token is: llguidance would
    take the token 0 for an end, whose text would be in the answer.
    """

    definition: str
    vocab_size: int
    eos_token_ids: tuple[TokenId, ...]
    special_tokens: Mapping[str, TokenId]

    def build(self) -> LLTokenizer:
        """Build llguidance's tokenizer. Takes seconds for 150,000 tokens."""
        ends = list(self.eos_token_ids) or sorted(self.special_tokens.values())[:1] or None
        return LLTokenizer(
            self.definition, n_vocab=self.vocab_size, eos_token=ends, slices=list(_SLICES)
        )


def limits() -> LLParserLimits:
    """Bounds on a grammar's size and on the work for one mask, a few milliseconds."""
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher for the grammar. Raises ``InvalidRequest`` with llguidance's error, if any."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidRequest(matcher.get_error())
    return matcher
