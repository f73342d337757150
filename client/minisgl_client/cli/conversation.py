"""What a chat shell remembers: messages, the system message, parameters.

Knows nothing about terminals or servers. Invariant: messages of user and assistant alternate, and
the last is an assistant's; a question is added together with its answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Conversation:
    parameters: dict[str, Any]
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """What the server gets: all that was said, and the question."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Remember a question and its answer."""
        self.turns += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def save(self, path: Path) -> None:
        """Write it all to a JSON file; raises ``OSError``.

        Half of a surrogate pair, which may come from JSON or from a terminal that is not UTF-8,
        is written as JSON escapes it.
        """
        content = {
            "system": self.system,
            "parameters": self.parameters,
            "messages": self.turns,
        }
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        path.write_bytes(text.encode(errors="backslashreplace"))
