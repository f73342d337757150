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
        """Write everything to a JSON file; raises ``OSError``."""
        content = {
            "system": self.system,
            "parameters": self.parameters,
            "messages": self.turns,
        }
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
