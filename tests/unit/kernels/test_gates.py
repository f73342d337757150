"""What CUDA C++ sources are told about gates, against the names that they have for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl_backend.gates import ClampedGate, ExpertsGate, LimitedGate
from minisgl_backend.kernels.cuda import gates


@pytest.mark.parametrize(
    ("gate", "name"),
    [
        ("silu", "SILU"),
        ("gelu", "GELU"),
        (ClampedGate(alpha=1.702, limit=7.0), "CLAMPED"),
        (LimitedGate(7.0), "LIMITED"),
        (LimitedGate(7.0, on_input=True), "BOUNDED"),
    ],
)
def test_gates_have_the_names_of_the_sources(gate: ExpertsGate, name: str) -> None:
    assert gates.gate_macros(gate) == {"GATED": True, "GATE": names().index(name)}


def test_blocks_without_gates() -> None:
    assert gates.gate_macros(None)["GATED"] is False
    square = gates.gate_macros(None, squares_relu=True)
    assert square == {"GATED": False, "GATE": names().index("SQUARED_RELU")}


def names() -> list[str]:
    """The enum's, in their order."""
    source = Path(gates.__file__).with_suffix(".cuh").read_text(encoding="utf-8")
    found = re.search(r"enum \{ (.+) \};", source)
    assert found is not None
    return found[1].split(", ")
