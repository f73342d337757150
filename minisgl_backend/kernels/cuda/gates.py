"""What the sources that include ``gates.cuh`` are told about a gate."""

from __future__ import annotations

from minisgl_backend.experts_spec import ClampedGate, GeluGate


def gate_macro(gate: ClampedGate | GeluGate | None) -> int:
    """The macro GATE; ``gate`` None stands for SiLU."""
    if gate is None:
        return 0
    return 1 if isinstance(gate, ClampedGate) else 2


def gate_arguments(gate: ClampedGate | GeluGate | None) -> dict[str, float]:
    """The fields of a gate in a kernel's arguments; those left out are 0."""
    return {"alpha": gate.alpha, "limit": gate.limit} if isinstance(gate, ClampedGate) else {}
