"""Looks up what followed when the last tokens of a sequence stood somewhere before.

That may be earlier in the sequence itself (prompt lookup decoding, A. Saxena, 2023), or in an
answer that ended lately (as in SuffixDecoding, arXiv 2411.04975): agents ask alike and get alike
answers, such as calls with the same fields, or a file that is edited again. The longer the part
that both have in common, the more likely they go on alike.

Knows tokens, and the keys by which the prefix cache keeps requests apart. Must not know rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from minisgl_backend.request import EMPTY, IntArray

LEAST: Final = 3
"""Number of last tokens that must have stood there."""
_MOST: Final = 32
"""Number of last tokens that are compared. Almost all guesses after as many are right."""
_MOST_PLACES: Final = 2048
"""Number of places of the last token, the latest ones, that are looked at."""
_END: Final = -1
"""Stands behind each answer; no token equals it."""


class RecentAnswers:
    """The answers that ended last, ``num_tokens`` tokens of them. They are found only by requests
    with the same ``Request.cache_key``."""

    def __init__(self, num_tokens: int) -> None:
        self._tokens = np.full(num_tokens, _END, dtype=np.int32)  # a ring
        self._keys = np.zeros(num_tokens, dtype=np.int64)  # hashes
        self._next = 0

    def add(self, answer: IntArray, cache_key: str) -> None:
        """Keep an answer, int32[num_tokens], in place of the oldest ones; unless it is too short to
        tell anything."""
        size = len(self._tokens)
        if not size or len(answer) <= LEAST:
            return
        tokens = np.append(answer[-(size - 1) :], np.int32(_END))
        places = np.arange(self._next, self._next + len(tokens)) % size
        self._tokens[places], self._keys[places] = tokens, hash(cache_key)
        self._next = (self._next + len(tokens)) % size

    def following(self, tokens: IntArray, most: int, cache_key: str) -> tuple[int, IntArray]:
        """How many of the last ``tokens``, int32[num_tokens], stand in an answer, and what follows
        there, up to ``most``."""
        ends = np.flatnonzero(self._tokens == tokens[-1])
        split = int(np.searchsorted(ends, self._next))
        older, newer = ends[split:], ends[:split]
        ends = np.concatenate([older[-_MOST_PLACES:], newer[-_MOST_PLACES:]])[-_MOST_PLACES:]
        ends = ends[self._keys[ends] == hash(cache_key)]
        end, length = _longest(self._tokens, ends, tokens)
        if not length:
            return 0, EMPTY
        found = self._tokens[np.arange(end + 1, end + 1 + most) % len(self._tokens)]
        behind = np.flatnonzero(found == _END)
        return length, found[: behind[0]] if len(behind) else found


def guesses_at(
    tokens: IntArray,
    most: int,
    recent: RecentAnswers | None = None,
    cache_key: str = "",
    *,
    least: int = LEAST,
) -> IntArray:
    """Guesses at the next tokens after ``tokens``, int32[num_tokens]: up to ``most``, and none if
    fewer than ``least`` of the last tokens, which is at least ``LEAST``, have stood together
    before.

    If these stand less than ``most`` before the end, what is between is repeated.
    """
    if len(tokens) <= least or not most:
        return EMPTY
    end, length = _longest(tokens[:-1], np.flatnonzero(tokens[:-1] == tokens[-1]), tokens)
    if recent is not None and length < _MOST:
        length_there, found = recent.following(tokens, most, cache_key)
        if length_there > max(length, least - 1) and len(found):
            return found
    if length < least:
        return EMPTY
    found = tokens[end + 1 : end + 1 + most]
    return found if len(found) == most else np.resize(found, most)


def _longest(text: IntArray, ends: IntArray, tokens: IntArray) -> tuple[int, int]:
    """The longest part of ``text`` that equals the last ``tokens`` and is at least ``LEAST`` long,
    up to ``_MOST``: the index of its last token, and its length; of equally long ones the last.
    The length is 0 if there is none. ``ends`` are the indices of ``tokens[-1]``, in order."""
    most, length = min(_MOST, len(tokens)), 0
    if not len(ends):
        return 0, 0
    ends = ends[-_MOST_PLACES:]
    # the last place first: where a text repeats itself again and again, all are as good
    end = int(ends[-1])
    if np.array_equal(text[max(0, end + 1 - most) : end + 1], tokens[-most:]):
        return end, most
    while length < most:
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return (int(ends[-1]), length) if length >= LEAST else (0, 0)
