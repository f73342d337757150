"""Types of options of benchmarks and checks. Must not know any command."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import click


class FiniteRange(click.FloatRange):
    """A range of finite numbers; click's have NaN in them, too."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not finite", param, ctx)
        return number


POSITIVE_INT: Final = click.IntRange(1)
SEED: Final = click.IntRange(0)
POSITIVE: Final = FiniteRange(0, min_open=True)
TEMPERATURE: Final = FiniteRange(0)


def numbers(kind: Callable[[str], float]) -> Callable[..., Sequence[float]]:
    """The callback of an option whose value is positive numbers, separated by commas.

    An empty one is refused unless that is the default.
    """

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> Sequence[float]:
        try:
            given = [kind(part) for part in value.split(",") if part]
        except ValueError:
            raise click.BadParameter(f"{value!r} is no list of numbers") from None
        if not all(0 < number < float("inf") for number in given):
            raise click.BadParameter(f"{value!r} has a number that is not above 0")
        if not given and param.default:
            raise click.BadParameter("must not be empty")
        return given

    return parse
