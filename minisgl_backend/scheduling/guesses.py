"""Guesser at the next tokens of decoding rows, from three sources: what was said before, what their
grammars leave no choice about, and the model's MTP layer.

Text repeats itself: code that is edited, documents that are quoted, calls with the same fields. If
the last tokens of a sequence have occurred before (``scheduling.lookup``), those that followed then
may follow again. And a model may have a layer for multi-token prediction (MTP): in each step it
guesses at what follows the tokens of that step. Tokens that a grammar forces are certain, so they
come first. What is looked up is nearly as good where many of the last tokens have occurred before;
otherwise the layer's guesses are better.

So a step computes the row's last token and the guesses together, and samples a token after each. As
long as samples equal the guesses, the next sample is what a later step would have sampled, since it
depends only on the tokens before it, its position and the seed. So a row gets at least one token a
step, and the same ones as without guesses, but for the rounding of larger steps.

What the layer guesses stays on the device, and ``MTP_GUESS`` and below stand for it here. Only
guesses for rows with a grammar are reported, since the grammar may not allow them.

A form of speculative decoding (Leviathan et al., arXiv 2211.17192). Knows the tokens of rows, what
their grammars leave open (``Lookahead``), and for which rows the layer has guessed. Must not know
pages or plans.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl_backend.plan import MTP_GUESS
from minisgl_backend.request import EMPTY, IntArray
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.lookup import LEAST, RecentAnswers, guesses_at
from minisgl_backend.scheduling.running import RunningRows

_NOWHERE: Final = -1
"""In place of a position: there are no guesses."""
_PAUSE: Final = 4
"""Number of tokens that a row gets without guesses, or with forced ones alone, after guesses of
which none was right."""
_MANY: Final = 8
"""Number of last tokens after which what is looked up is better than the MTP layer's guesses."""


class Guesser:
    """How many guesses each row of ``RunningRows`` may have next, by how good its last ones were.

    At most ``most_tokens`` for a row are looked up, in the row's own tokens or in ``recent``
    answers. The MTP layer guesses ``mtp_tokens``, whose being wrong changes nothing. A grammar may
    force as many as the larger of the two.

    The layer's guesses are for one position of the row. Once the row goes on from it, with these
    guesses or without, they are not used anymore.

    Invariant: there are none while more than ``max_rows`` sequences hold a row, prefilling ones
    included. Only rows that are held may have updates of recurrent states that a step with guesses
    has kept and no later step has added. So these are never more than ``max_rows`` rows, for which
    the executor has memory.
    """

    def __init__(
        self,
        rows: RunningRows,
        recent: RecentAnswers,
        *,
        most_tokens: int,
        max_rows: int,
        mtp_tokens: int,
    ) -> None:
        self._rows = rows
        self._recent = recent
        self._most_tokens = most_tokens
        self._max_rows = max_rows
        self._mtp_tokens = mtp_tokens
        num_rows = len(rows.sequences)
        self._may_have = np.zeros(num_rows, dtype=np.int32)  # number of tokens to look up
        self._begin_at = np.zeros(num_rows, dtype=np.int32)  # none up to this planned position
        self._are_mtp = np.zeros(num_rows, dtype=np.bool_)  # whether the last guesses were
        self._mtp_at = np.full(num_rows, _NOWHERE, dtype=np.int32)  # the planned position that ...
        self._mtp_guesses = np.zeros((num_rows, mtp_tokens), dtype=np.int32)  # ... these are for
        self._codes = MTP_GUESS - np.arange(mtp_tokens, dtype=np.int32)  # what stands for them

    @property
    def all_on_device(self) -> bool:
        """Whether the MTP layer alone guesses, but for grammars: then no guess depends on what the
        host knows."""
        return not self._most_tokens

    def begin(self, row: int) -> None:
        """A sequence has taken the row."""
        self._may_have[row] = self._most_tokens
        self._begin_at[row] = 0
        self._mtp_at[row] = _NOWHERE
        self._mtp_guesses[row] = self._codes

    def wanting_mtp(self, rows: IntArray) -> IntArray:
        """Those of ``rows``, which get a token in the step being planned, that can use guesses of
        the MTP layer then: so that the layer's passes end within the row's limit, and that what is
        guessed is not the last token that the row may have."""
        running = self._rows
        if running.num_used > self._max_rows:
            return EMPTY
        ends = running.planned[rows]  # positions of the tokens that they get, if all are right
        # a guess and what is sampled after it come behind that token
        fits = ends + max(3, self._mtp_tokens - 1) <= running.limit[rows]
        return rows[fits & ~running.retiring[rows]]

    def expect_mtp(self, rows: IntArray) -> None:
        """The step being planned brings guesses of the MTP layer for ``rows``."""
        self._mtp_at[rows] = self._rows.planned[rows]

    def take_mtp(self, rows: IntArray, reported_rows: IntArray, guesses: IntArray) -> None:
        """A step is committed in which the MTP layer has guessed for ``rows``. Those that were not
        planned further since may use that. ``guesses``, int32[num_reported_rows, mtp_tokens], are
        those for ``reported_rows``, which are the ones with a grammar."""
        if len(reported_rows):
            self._mtp_guesses[reported_rows] = guesses
        rows = rows[self._rows.accepting[rows] & (self._rows.in_flight[rows] == 0)]
        self._mtp_at[rows] = self._rows.planned[rows]

    def of_rows(self, ready: IntArray, lookahead: Lookahead | None = None) -> dict[int, IntArray]:
        """The guesses at the next tokens of each of the rows ``ready`` that has some, int32[n]. For
        rows with a grammar there are none without ``lookahead``.

        While a row has a step in flight, its last token is not known. Then guesses of the MTP layer
        are for where the row is after that step, and others, at the tokens from that one on, only
        tell that there is something to wait for.
        """
        found: dict[int, IntArray] = {}
        rows = self._rows
        if rows.num_used > self._max_rows:
            return found
        # a guess at the last token that a row may have would be of no use
        planned = rows.planned[ready]
        most = rows.limit[ready] - planned - 2
        lookups = np.minimum(most, self._may_have[ready])
        lookups = np.where(planned >= self._begin_at[ready], lookups, 0)
        of_mtp = np.where(planned == self._mtp_at[ready], np.minimum(most, self._mtp_tokens), 0)
        forced = np.minimum(most, max(self._most_tokens, self._mtp_tokens))
        has_grammar = rows.masked[ready]
        may_guess = np.maximum(lookups, of_mtp) > 0
        may_guess[has_grammar] = (forced[has_grammar] > 0) & (lookahead is not None)
        for index in np.flatnonzero(may_guess).tolist():
            row, num_lookups = int(ready[index]), int(lookups[index])
            mtp_guesses = self._mtp_guesses[row, : of_mtp[index]]
            if lookahead is not None and has_grammar[index]:
                most_forced = int(forced[index])
                guesses = self._under_grammar(row, most_forced, num_lookups, mtp_guesses, lookahead)
            else:
                guesses = self._without_grammar(row, num_lookups, mtp_guesses)
            if len(guesses):
                found[row] = guesses
        return found

    def _without_grammar(self, row: int, num_lookups: int, mtp_guesses: IntArray) -> IntArray:
        """What is looked up, up to ``num_lookups``, or the ``mtp_guesses``, whichever is better."""
        least = _MANY if len(mtp_guesses) else LEAST
        looked_up = self._looked_up(row, EMPTY, num_lookups, least)
        self._are_mtp[row] = not len(looked_up)
        return looked_up if len(looked_up) else mtp_guesses

    def _under_grammar(
        self,
        row: int,
        most_forced: int,
        num_lookups: int,
        mtp_guesses: IntArray,
        lookahead: Lookahead,
    ) -> IntArray:
        """The tokens that the grammar forces, up to ``most_forced``; if these are fewer than
        ``num_lookups``, others after them, as far as the grammar allows. If none is forced, the
        ``mtp_guesses`` come first."""
        rows, request_id = self._rows, self._rows.sequence(row).request.id
        forced = np.array(lookahead.forced(request_id)[:most_forced], dtype=np.int32)
        self._are_mtp[row] = len(mtp_guesses) > 0 and not len(forced)
        if self._are_mtp[row]:
            guesses = mtp_guesses
        else:
            looked_up = self._looked_up(row, forced, num_lookups - len(forced))
            guesses = np.concatenate([forced, looked_up])
        if not len(guesses) or rows.in_flight[row]:
            return guesses
        num_allowed = lookahead.allowed(request_id, guesses.tolist())
        if not num_allowed:
            self.judge(row, len(guesses), 0)
        return guesses[:num_allowed]

    def _looked_up(self, row: int, forced: IntArray, most: int, least: int = LEAST) -> IntArray:
        """Guesses at what follows the tokens of a row and those that are ``forced`` after them: up
        to ``most``, and none if fewer than ``least`` of the last tokens have occurred before."""
        if most <= 0:
            return EMPTY
        tokens = np.concatenate([self._rows.known(row), forced])
        cache_key = self._rows.sequence(row).request.cache_key
        return guesses_at(tokens, most, self._recent, cache_key, least=least)

    def go_back(self, row: int, num_wrong: int) -> None:
        """The row has gone back to before its wrong guesses, and so has what the layer guesses in a
        step that was planned as if they were right."""
        self._mtp_at[row] -= num_wrong

    def judge(self, row: int, num_guesses: int, num_right: int) -> None:
        """Note how many of the row's last guesses were right. If they were looked up and are wrong,
        fewer are looked up next."""
        if self._are_mtp[row]:
            return
        if num_right == num_guesses:
            self._may_have[row] = self._most_tokens
        else:
            self._may_have[row] = min(self._most_tokens, 2 * num_right + 1)
        if not num_right:
            self._begin_at[row] = self._rows.planned[row] + _PAUSE
