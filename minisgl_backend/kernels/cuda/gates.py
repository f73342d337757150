"""What the sources that include ``gates.cuh`` are told about a gate."""

from __future__ import annotations

from minisgl_backend.experts_spec import ClampedGate, GeluGate
from minisgl_backend.kernels.activation import Gate


def gate_macro(gate: Gate | ClampedGate | GeluGate | None) -> int:
    """The macro GATE; of experts' gates None stands for SiLU."""
    if isinstance(gate, ClampedGate):
        return 1
    return 2 if gate == "gelu" or isinstance(gate, GeluGate) else 0


def gate_arguments(gate: ClampedGate | GeluGate | None) -> dict[str, float]:
    """The fields of a gate in a kernel's arguments; those left out are 0."""
    return {"alpha": gate.alpha, "limit": gate.limit} if isinstance(gate, ClampedGate) else {}
