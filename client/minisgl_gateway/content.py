"""A message's content as chat templates know it: a text, or a list of parts that are texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Content: TypeAlias = str | Sequence[Mapping[str, str]] | None


def content_of(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """The content that says these texts."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""


def texts_of(content: Content) -> Sequence[str]:
    """The texts that a content says."""
    return [content] if isinstance(content, str) else [part["text"] for part in content or ()]


def text_of(content: Content) -> str:
    """A content as one text, each part on a line of its own. The engine joins parts likewise for
    templates that take one text."""
    return "\n".join(texts_of(content))
