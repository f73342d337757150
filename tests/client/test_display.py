"""What is written to a terminal to show an answer."""

from __future__ import annotations

from io import StringIO

from hypothesis import given
from hypothesis import strategies as st
from minisgl_client.cli.display import MarkdownDisplay, split_blocks
from rich.console import Console

ANSWER = """\
# Title
A **bold** word,
and *another*.

- one
- two

```python
x = 1

y = 2
```

The end.
"""


def shown(pieces: list[str]) -> str:
    """What a terminal finally shows."""
    console = Console(file=StringIO(), force_terminal=True, width=40, color_system="standard")
    with MarkdownDisplay(console) as display:
        for piece in pieces:
            display.push(piece)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_markdown_is_drawn() -> None:
    text = shown(list(ANSWER))
    for drawn in ("\x1b[1;4mTitle", "\x1b[1mbold", "\x1b[3manother", " • ", "The end."):
        assert drawn in text
    assert "**" not in text and "```" not in text and "# " not in text
    assert text.index("two") < text.rindex("The end.")


def test_html_is_shown_as_text() -> None:
    text = shown(["<think>\nTwo and two.\n</think>\n\nA List<String>, ", "<!-- with a note -->"])
    for told in ("<think>", "Two and two.", "</think>", "A List<String>, <!-- with a note -->"):
        assert told in text


def test_control_characters_stay_away() -> None:
    text = shown(["a\x1b[31mred\x07\x9b5m", "\x1b]0;title\x07b"])
    assert "a[31mred5m]0;titleb" in text
    assert "\x1b[31m" not in text and "\x07" not in text and "\x9b" not in text


def test_nothing_to_show() -> None:
    assert "Title" not in shown([])


blocks = st.lists(st.sampled_from(["a", "\n", "\n\n", "```", "- b", " "])).map("".join)


@given(blocks)
def test_blocks_are_cut_where_nothing_can_change_them(text: str) -> None:
    complete, rest = split_blocks(text)
    assert complete + rest == text
    assert complete.count("```") % 2 == 0
    assert complete == "" or complete.endswith("\n\n")


@given(blocks, blocks)
def test_complete_blocks_stay_as_they_are(text: str, more: str) -> None:
    assert split_blocks(text + more)[0].startswith(split_blocks(text)[0])
