"""What the sources that include ``gates.cuh`` are told about a gate."""

from __future__ import annotations

from minisgl_backend.gates import ClampedGate, Gate


def gate_macro(gate: Gate | ClampedGate | None) -> int:
    """The macro GATE; for a weight without gates, any."""
    if isinstance(gate, ClampedGate):
        return 1
    return 2 if gate == "gelu" else 0


def gate_arguments(gate: Gate | ClampedGate | None) -> dict[str, float]:
    """The fields of a gate in a kernel's arguments; those left out are 0."""
    return {"alpha": gate.alpha, "limit": gate.limit} if isinstance(gate, ClampedGate) else {}
