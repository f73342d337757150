"""An engine that thinks, speaks and calls a tool in channels, as gpt-oss does."""

from __future__ import annotations

from typing import Final

from tests.gateway.magistral import scripted_model

THOUGHT: Final = "Bogotá is wet.\n\nBut today?"
WORDS: Final = "I will look it up."
ARGUMENTS: Final = '{"city": "Bogotá"}'
_NEXT: Final = "<|end|><|start|>assistant"
_SAID: Final = (
    f"<|channel|>analysis<|message|>{THOUGHT}{_NEXT}"
    f"<|channel|>commentary<|message|>{WORDS}{_NEXT}"
    f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
)

TritonPythonModel = scripted_model(_SAID, end="<|call|>")
