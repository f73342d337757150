"""How many answers may be under way: in total, and for one key.

Must not know requests, or what an answer is made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from minisgl_gateway.errors import busy, invalid


class Admission:
    """Counts of answers under way, on one event loop."""

    def __init__(self, most: int, most_per_key: int) -> None:
        self._most = most
        self._most_per_key = most_per_key
        self._by_label: Counter[str] = Counter()
        self.num_open = 0

    @contextmanager
    def admit(self, label: str, num_answers: int) -> Iterator[None]:
        """Count ``num_answers`` as under way while the block runs.

        ``label`` is that of the caller's key, "" if no keys are in use: then only the total limit
        applies. Raises ``ApiError``: 429, or 400 if there is never room for this many.
        """
        most = min(self._most, self._most_per_key) if label else self._most
        if num_answers > most:
            raise invalid(f"at most {most} answers can be had at a time, got {num_answers}", "n")
        if label and self._by_label[label] + num_answers > self._most_per_key:
            raise busy(429, f"at most {self._most_per_key} answers at a time", "too_many_requests")
        if self.num_open + num_answers > self._most:
            raise busy(429, f"all {self._most} places are taken", "too_many_requests")
        self.num_open += num_answers
        self._by_label[label] += num_answers
        try:
            yield
        finally:
            self.num_open -= num_answers
            self._by_label[label] -= num_answers
            if not self._by_label[label]:
                del self._by_label[label]
