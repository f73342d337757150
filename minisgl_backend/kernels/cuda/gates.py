"""What the sources that include ``gates.cuh`` are told about a gate, or about an activation without
one."""

from __future__ import annotations

from minisgl_backend.gates import ClampedGate, ExpertsGate, LimitedGate

_SILU, _CLAMPED, _GELU, _SQUARED_RELU, _LIMITED, _BOUNDED = range(6)  # in the order of gates.cuh


def gate_macros(gate: ExpertsGate | None, *, squares_relu: bool = False) -> dict[str, int]:
    """The macros that say whether a weight has gates, and of which function. ``squares_relu``, only
    without a gate: results are squares of ReLU."""
    assert gate is None or not squares_relu
    if isinstance(gate, ClampedGate):
        function = _CLAMPED
    elif gate == "gelu":
        function = _GELU
    elif squares_relu:
        function = _SQUARED_RELU
    elif isinstance(gate, LimitedGate):
        function = _BOUNDED if gate.on_input else _LIMITED
    else:
        function = _SILU
    return {"GATED": gate is not None, "GATE": function}


def gate_arguments(gate: ExpertsGate | None) -> dict[str, float]:
    """The fields of a gate in a kernel's arguments; those left out are 0."""
    if isinstance(gate, LimitedGate):
        return {"limit": gate.limit}
    return {"alpha": gate.alpha, "limit": gate.limit} if isinstance(gate, ClampedGate) else {}
