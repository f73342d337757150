"""An answer on the terminal while it comes: Markdown, redrawn as it grows.

Complete blocks are printed for good, so that only the last block is redrawn, and long answers
scroll. Control characters in the answer never reach the terminal. HTML is text, like thoughts
between their marks, ``List<String>``, and what else looks like it. Must not know where the text
comes from.
"""

from __future__ import annotations

from typing import Final

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.spinner import Spinner

_FENCE: Final = "```"
_PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
"""Rich's own parser, except that it takes nothing for HTML, which Rich would leave out."""
_CONTROLS: Final = {
    code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def without_controls(text: str) -> str:
    """The text without anything that a terminal would obey, except newlines and tabs."""
    return text.translate(_CONTROLS)


class MarkdownDisplay:
    """A context manager: ``push`` the text as it comes."""

    def __init__(self, console: Console) -> None:
        self._open = ""
        self._live = Live(
            Spinner("dots"), console=console, refresh_per_second=12, vertical_overflow="visible"
        )

    def __enter__(self) -> MarkdownDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.update(_drawn(self._open))
        self._live.stop()

    def push(self, text: str) -> None:
        complete, self._open = split_blocks(self._open + without_controls(text))
        if complete:
            self._live.console.print(_drawn(complete))
        if complete or self._open:
            self._live.update(_drawn(self._open))


def _drawn(text: str) -> Markdown:
    """Markdown in which each line of the answer stays a line: two blanks at its end say so."""
    drawn = Markdown("")
    drawn.parsed = _PARSER.parse(text.replace("\n", "  \n"))
    return drawn


def split_blocks(text: str) -> tuple[str, str]:
    """The blocks that no later text can change, and the rest.

    The cut is at the last blank line outside of fenced code.
    """
    end = text.rfind("\n\n")
    while end > 0 and text.count(_FENCE, 0, end) % 2:
        end = text.rfind("\n\n", 0, end)
    return (text[: end + 2], text[end + 2 :]) if end > 0 else ("", text)
