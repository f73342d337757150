"""What the programs in this folder share. Of any environment it needs only pydantic.

A program takes two addresses, of a gateway in front of the agent of ``tests.gateway.agent`` and of
one in front of the demo model, runs its cases, and prints one JSON object with the result of each
case, or the error that it ended with.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "minisgl"
QUESTION = "How is the weather in Bogotá?"


class Report(BaseModel):
    """The weather of a city."""

    # otherwise the schema allows more properties, and a senseless model writes many
    model_config = ConfigDict(extra="forbid")

    city: Literal["Bogotá", "Paris"]
    rains: bool
    degrees: int = Field(ge=-50, le=50)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def addresses() -> tuple[str, str]:
    """The base addresses of the agent and of the demo model."""
    agent, demo = sys.argv[1:]
    return agent, demo


def run(*cases: Callable[[], Any]) -> None:
    """Run all cases and print their results by name."""
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        try:
            results[case.__name__] = {"result": case()}
        except Exception:
            results[case.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(results, default=lambda value: value.model_dump()))
