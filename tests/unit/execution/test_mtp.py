"""What the host learns of the MTP layer's guesses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.execution.mtp import GuessesOnHost
from minisgl_backend.plan import MTP_GUESS, Checks
from minisgl_backend.request import IntArray


class Made:
    """Guesses that are on the host, or whose making raised ``error``."""

    def __init__(self, *guesses: list[int], error: str | None = None) -> None:
        self._guesses, self._error = torch.tensor(guesses, dtype=torch.int32), error

    def result(self) -> Tensor:
        if self._error is not None:
            raise RuntimeError(self._error)
        return self._guesses


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def checks(*tokens: int) -> Checks:
    """Of row 4, three tokens, and of row 2, two."""
    return Checks(ints(4, 2), ints(9, 7), ints(3, 2), ints(*tokens))


def test_codes_of_checks_are_the_last_guesses_of_their_rows() -> None:
    guesses = GuessesOnHost()
    guesses.put(ints(1, 2, 4), Made([10, 20, 40], [11, 21, 41]))
    guesses.put(ints(2), Made([22], [23]))
    checked = guesses.checked(checks(7, MTP_GUESS, MTP_GUESS - 1, 8, MTP_GUESS))
    guesses.put(ints(4, 2), Made([0, 0], [0, 0]))  # those of the step itself
    assert checked is not None
    assert checked().tolist() == [7, 40, 41, 8, 22]


def test_checks_whose_tokens_the_plan_has_are_left_alone() -> None:
    guesses = GuessesOnHost()
    assert guesses.checked(checks(7, 3, 4, 8, 5)) is None
    assert guesses.checked(Checks()) is None


def test_whoever_checks_guesses_that_broke_gets_the_error() -> None:
    guesses = GuessesOnHost()
    guesses.put(ints(2, 4), Made(error="out of memory"))
    checked = guesses.checked(checks(7, 3, 4, 8, MTP_GUESS))
    assert checked is not None
    with pytest.raises(RuntimeError, match="out of memory"):
        checked()
