"""The tokens of a step that checks guesses, for layers with recurrent states.

The *check* of a row is the tokens that it computes in such a step: its last one and guesses at
those after it, if there are any. A state cannot go back to before a wrong guess. So the step leaves
states *unsettled*: they stay as they are, and what its tokens would add to them is kept, at a place
of the check. Once it is known how many of these tokens count, as much is added (``settle``), before
the row's next tokens are computed.

Knows tokens by index, and places. Must not know what is kept, or which guesses are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

CHECK_COLUMNS: Final = 3
"""Numbers of a line of ``CheckedTokens.lines``."""

NO_PLACE: Final = -1
"""In place of a place: the token is padding."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckedTokens:
    """The decoding rows of a step that checks guesses, as kernels read them.

    ``lines`` int32 [num_tokens, CHECK_COLUMNS], on the device, one per token: the place of its
    check, its index in the check, and the number of tokens of the check, which follow one another.
    The place of padding is ``NO_PLACE``.
    """

    lines: Tensor

    def listed(self) -> list[tuple[int, int, int]]:
        """The checks: the first token, the number of tokens, and the place."""
        return [
            (token, length, place)
            for token, (place, index, length) in enumerate(self.lines.tolist())
            if place != NO_PLACE and index == 0
        ]
