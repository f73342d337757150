"""Options of a command that describe one thing together, such as its requests.

Must not know what any group describes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

Callback = Callable[..., Any]
Command = TypeVar("Command", bound=Callback)


def with_options(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """A command that also takes these options; its help shows them in this order."""
    for option in reversed(options):
        command = option(command)
    return command


def option_group(
    kind: Any, name: str, options: Sequence[Callable[[Callback], Callback]]
) -> Callable[[Callback], Callback]:
    """A decorator that adds ``options`` to a click callback, which gets them as ``name``: a
    ``kind``, which is a dataclass with a field for each."""

    def decorate(command: Callback) -> Callback:
        @functools.wraps(command)
        def with_group(*args: Any, **kwargs: Any) -> Any:
            given = {field.name: kwargs.pop(field.name) for field in fields(kind)}
            return command(*args, **{name: kind(**given)}, **kwargs)

        decorated: Callback = with_group
        return with_options(decorated, options)

    return decorate
