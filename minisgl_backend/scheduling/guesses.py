"""Guesser at the next tokens of decoding rows, from what was said before.

Text repeats itself: code that is edited, documents that are quoted, calls with the same fields. If
the last tokens of a sequence have occurred before (``scheduling.lookup``), those that followed then
may follow again. So a step computes the row's last token and the guesses together, and samples a
token after each. As long as samples equal the guesses, the next sample is what a later step would
have sampled, since it depends only on the tokens before it, its position and the seed. So a row
gets at least one token a step, and the same ones as without guesses, but for the rounding of larger
steps.

A form of speculative decoding (Leviathan et al., arXiv 2211.17192). Knows the tokens of rows and
what they ask of sampling. Must not know pages or plans.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl_backend.request import IntArray
from minisgl_backend.scheduling.lookup import RecentAnswers, guesses_at
from minisgl_backend.scheduling.running import RunningRows

_PAUSE: Final = 4
"""Number of tokens that a row gets without guesses after those of which none was right."""


class Guesser:
    """How many guesses each row of ``RunningRows`` may have next, by how good its last ones were.

    At most ``most_tokens`` for a row, and none while more than ``max_rows`` rows decode. They come
    from the row's own tokens, or from ``recent`` answers.
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
        sampling = self._rows.sequence(row).request.sampling
        # these choose a token by all tokens before it, which are not known at guesses
        depends = sampling.has_penalties or sampling.grammar is not None
        self._may_have[row] = 0 if depends else self._most_tokens
        self._begin_at[row] = 0

    def of_rows(self, ready: IntArray) -> dict[int, IntArray]:
        """The guesses at the next tokens of each of the rows ``ready`` that has some, int32[n].

        While a row has a step in flight, its last token is not known: then they are guesses at the
        tokens from that one on, and tell whether there is something to wait for.
        """
        if len(ready) > self._max_rows:
            return {}
        found, planned = {}, self._rows.planned
        # a guess at the last token that a row may have would be of no use
        most = np.minimum(self._may_have[ready], self._rows.limit[ready] - planned[ready] - 2)
        may_guess = (most > 0) & (planned[ready] >= self._begin_at[ready])
        for row, count in zip(ready[may_guess].tolist(), most[may_guess].tolist(), strict=True):
            cache_key = self._rows.sequence(row).request.cache_key
            guesses = guesses_at(self._rows.known(row), count, self._recent, cache_key)
            if len(guesses):
                found[row] = guesses
        return found

    def judge(self, row: int, num_guesses: int, num_right: int) -> None:
        """Note how many guesses were right. A row whose guesses are wrong gets fewer."""
        if num_right == num_guesses:
            self._may_have[row] = self._most_tokens
        else:
            self._may_have[row] = min(self._most_tokens, 2 * num_right + 1)
        if not num_right:
            self._begin_at[row] = self._rows.planned[row] + _PAUSE
