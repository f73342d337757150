"""Guesser at the next tokens of decoding rows, from what was said before, and from what their
grammars leave no choice about.

Text repeats itself: code that is edited, documents that are quoted, calls with the same fields. If
the last tokens of a sequence have occurred before (``scheduling.lookup``), those that followed then
may follow again. So a step computes the row's last token and the guesses together, and samples a
token after each. As long as samples equal the guesses, the next sample is what a later step would
have sampled, since it depends only on the tokens before it, its position and the seed. So a row
gets at least one token a step, and the same ones as without guesses, but for the rounding of larger
steps.

A form of speculative decoding (Leviathan et al., arXiv 2211.17192). Knows the tokens of rows and
what their grammars leave open (``Lookahead``). Must not know pages or plans.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl_backend.request import IntArray
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.lookup import RecentAnswers, guesses_at
from minisgl_backend.scheduling.running import RunningRows

_PAUSE: Final = 4
"""Number of tokens that a row gets without guesses, or with forced ones alone, after guesses of
which none was right."""


class Guesser:
    """How many guesses each row of ``RunningRows`` may have next, by how good its last ones were.

    At most ``most_tokens`` for a row. They come from the row's own tokens, or from ``recent``
    answers.

    Invariant: there are none while more than ``max_rows`` sequences hold a row, prefilling ones
    included. Only rows that are held may have updates of recurrent states that a step with guesses
    has kept and no later step has added. So these are never more than ``max_rows`` rows, for which
    the executor has memory.
    """

    def __init__(
        self, rows: RunningRows, recent: RecentAnswers, *, most_tokens: int, max_rows: int
    ) -> None:
        self._rows = rows
        self._recent = recent
        self._most_tokens = most_tokens
        self._max_rows = max_rows
        num_rows = len(rows.sequences)
        self._may_have = np.zeros(num_rows, dtype=np.int32)  # number of guesses
        self._begin_at = np.zeros(num_rows, dtype=np.int32)  # none up to this planned position

    def begin(self, row: int) -> None:
        """A sequence has taken the row."""
        self._may_have[row] = self._most_tokens
        self._begin_at[row] = 0

    def of_rows(self, ready: IntArray, lookahead: Lookahead | None = None) -> dict[int, IntArray]:
        """The guesses at the next tokens of each of the rows ``ready`` that has some, int32[n]. For
        rows with a grammar there are none without ``lookahead``.

        While a row has a step in flight, its last token is not known: then they are guesses at the
        tokens from that one on, and tell whether there is something to wait for.
        """
        found: dict[int, IntArray] = {}
        rows = self._rows
        if rows.num_used > self._max_rows:
            return found
        # a guess at the last token that a row may have would be of no use
        most = np.minimum(self._most_tokens, rows.limit[ready] - rows.planned[ready] - 2)
        lookups = np.minimum(most, self._may_have[ready])
        lookups = np.where(rows.planned[ready] >= self._begin_at[ready], lookups, 0)
        has_grammar = rows.masked[ready]
        may_guess = np.where(has_grammar, most if lookahead is not None else 0, lookups) > 0
        for index in np.flatnonzero(may_guess).tolist():
            row, num_lookups = int(ready[index]), int(lookups[index])
            if lookahead is not None and has_grammar[index]:
                guesses = self._under_grammar(row, int(most[index]), num_lookups, lookahead)
            else:
                guesses = self._looked_up(row, rows.known(row), num_lookups)
            if len(guesses):
                found[row] = guesses
        return found

    def _under_grammar(
        self, row: int, most: int, num_lookups: int, lookahead: Lookahead
    ) -> IntArray:
        """The tokens that the grammar forces, up to ``most``; if these are fewer than
        ``num_lookups``, others after them, as far as the grammar allows."""
        rows, request_id = self._rows, self._rows.sequence(row).request.id
        forced = np.array(lookahead.forced(request_id)[:most], dtype=np.int32)
        guesses = forced
        if len(forced) < num_lookups:
            tokens = np.concatenate([rows.known(row), forced])
            looked_up = self._looked_up(row, tokens, num_lookups - len(forced))
            guesses = np.concatenate([forced, looked_up])
        if not len(guesses) or rows.in_flight[row]:
            return guesses
        num_allowed = lookahead.allowed(request_id, guesses.tolist())
        if not num_allowed:
            self.judge(row, len(guesses), 0)
        return guesses[:num_allowed]

    def _looked_up(self, row: int, tokens: IntArray, most: int) -> IntArray:
        """Guesses at what follows ``tokens`` in a row, up to ``most``."""
        cache_key = self._rows.sequence(row).request.cache_key
        return guesses_at(tokens, most, self._recent, cache_key)

    def judge(self, row: int, num_guesses: int, num_right: int) -> None:
        """Note how many guesses were right. A row whose guesses are wrong gets fewer."""
        if num_right == num_guesses:
            self._may_have[row] = self._most_tokens
        else:
            self._may_have[row] = min(self._most_tokens, 2 * num_right + 1)
        if not num_right:
            self._begin_at[row] = self._rows.planned[row] + _PAUSE
