"""Progress of long work: a bar on a terminal, else log lines.

The work calls a function for each finished item, and must not know where that is shown.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[str], None]]]
"""(kind of work, number of items) -> a context whose value is called with each item's name."""


@contextmanager
def unseen(what: str, num_items: int) -> Iterator[Callable[[str], None]]:
    """Shows nothing; for ranks other than 0, and for callers who ask for no bar."""
    yield lambda item: None


@contextmanager
def shown(what: str, num_items: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr if it is a terminal; else one log line, and one at DEBUG for each item."""
    if not sys.stderr.isatty():
        logger.info("%s: %d", what, num_items)
        yield lambda item: logger.debug("%s: %s", what, item)
        return
    from rich.console import Console  # a server's processes have no terminal
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[item]}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_items, item="")
        yield lambda item: bar.update(task, advance=1, item=item)
