"""A Dockerfile as a list of instructions, without knowing what they do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined and its comments left out."""

    name: str
    text: str


def stages(path: Path) -> list[list[Instruction]]:
    """The instructions of each stage, the first being its ``FROM``."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    logical = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines)).splitlines()
    found: list[list[Instruction]] = []
    for line in filter(None, logical):
        name, _, text = line.partition(" ")
        instruction = Instruction(name, text.strip())
        if name == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def texts(stage: list[Instruction], name: str) -> list[str]:
    """The texts of the instructions with that name."""
    return [instruction.text for instruction in stage if instruction.name == name]
