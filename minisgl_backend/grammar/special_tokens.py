"""The special tokens of a tokenizer, and where texts have them.

Must not know what a text is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from minisgl_backend.request import TokenId


class SpecialTokens(dict[str, TokenId]):
    """The ids of special tokens, which have no text, by their names."""

    def __init__(self, ids: Mapping[str, TokenId] | None = None) -> None:
        super().__init__(ids or {})
        names = sorted(self, key=len, reverse=True)  # of several that fit, the longest
        self._names = re.compile(f"({'|'.join(map(re.escape, names))})" if names else "(?!)")

    def parts_of(self, text: str) -> list[str | TokenId]:
        """The special tokens in a text, by their ids, and the texts between them."""
        return [self.get(part, part) for part in self._names.split(text) if part]

    def begin(self, text: str) -> bool:
        """Whether a text begins with a special token."""
        return self._names.match(text) is not None
