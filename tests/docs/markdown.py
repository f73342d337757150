"""The links, headings and code of a Markdown page, without rendering it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.M)
_INLINE: Final = re.compile(r"`([^`\n]+)`")
_INDENTED: Final = re.compile(r"(?:^    .+\n)+", re.M)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code and its language, "" if none is named."""

    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A command in a console block, and its output according to the page ("" if none)."""

    command: str
    output: str


class Page:
    """One page of the documentation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text("utf-8")
        self.blocks = [Block(*found) for found in _FENCE.findall(text)]
        prose = _FENCE.sub("", text)
        self.blocks += [Block("", found) for found in _INDENTED.findall(prose)]
        self.prose = _INDENTED.sub("", prose)

    @property
    def links(self) -> list[str]:
        """The targets of all links and images."""
        return _LINK.findall(self.prose)

    @property
    def anchors(self) -> set[str]:
        """What a link may name after ``#``: GitHub's spelling of the headings."""
        slugs = (
            re.sub(r"[^\w\- ]", "", heading).lower() for heading in _HEADING.findall(self.prose)
        )
        return {slug.replace(" ", "-") for slug in slugs}

    @property
    def inline(self) -> list[str]:
        """Inline code."""
        return _INLINE.findall(self.prose)

    @property
    def calls(self) -> list[Call]:
        """The commands in console blocks, which follow ``$``; a line may be continued."""
        calls = []
        for block in self.blocks:
            if block.language == "console":
                for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
                    calls.append(_call(part))
        return calls


def _call(text: str) -> Call:
    """A command ends with the first line that leaves no quote open and is not continued."""
    lines = text.splitlines()
    command = ""
    while lines:
        command += lines.pop(0)
        if command.endswith("\\"):
            command = command[:-1]
        elif command.count("'") % 2 == 0:
            break
        else:
            command += "\n"
    return Call(command, "\n".join(lines).strip())
