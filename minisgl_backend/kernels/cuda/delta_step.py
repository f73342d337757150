"""Launches ``delta_step.cu``: a decode step of Gated DeltaNet for many rows, on Hopper.

It writes a state only after every ``WHOLE_EVERY``-th token (``kernels.layer_states``). A kernel is
for one number of heads and one type of states. Must not know which slot is whose.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.module import CudaModule, address
from minisgl_backend.kernels.dispatch import num_processors
from minisgl_backend.kernels.gated_delta import DeltaInputs, DeltaStates, DeltaWeights
from minisgl_backend.kernels.shared_memory import OF_HOPPER, most_bytes
from minisgl_backend.plan import WHOLE_EVERY

HEAD_DIM: Final = 128
"""Dimensions of keys and of values."""

_LEAST_STATES: Final = 256
"""Fewer states, of all rows, leave multiprocessors without work: then the kernel in Triton is
faster."""

_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_STAGES: Final = {4: 3, 2: 5}
"""States in shared memory, by their bytes per number."""
_GROUPS: Final = 2
"""Of warps that prepare inputs."""
_THREADS: Final = 256 + 128 * _GROUPS + 32
"""Consumers, preparers and the warp of the producer."""


class _Arguments(ctypes.Structure):
    """``Arguments`` of the source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "x", "z", "a", "b")),
        *((name, ctypes.c_void_p) for name in ("conv", "log_rates", "biases", "norm")),
        *((name, ctypes.c_void_p) for name in ("inputs", "states", "keys", "corrections")),
        *((name, ctypes.c_void_p) for name in ("decays", "begins", "slots", "positions")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("x", "z", "a", "b", "inputs")),
        ("states_stride", ctypes.c_longlong),
        ("num_rows", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


class DeltaStepKernel:
    """``kernels.gated_delta.delta_step`` for layers with these heads, of ``HEAD_DIM`` dimensions,
    a convolution of this width, and this type of states."""

    def __init__(
        self,
        num_key_heads: int,
        num_heads: int,
        conv_width: int,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shared_bytes = most_bytes(OF_HOPPER)
        constants = {
            "KEY_HEADS": num_key_heads,
            "HEADS": num_heads,
            "WIDTH": conv_width,
            "EVERY": WHOLE_EVERY,
            "KIND": _KINDS[state_dtype],
            "STAGES": _STAGES[state_dtype.itemsize],
            "GROUPS": _GROUPS,
            "SHARED_BYTES": shared_bytes,
        }
        self._num_key_heads, self._num_heads = num_key_heads, num_heads
        self._state_dtype = state_dtype
        module = CudaModule("delta_step.cu", constants, device)
        self._kernel = module.kernel("delta_step", shared_bytes=shared_bytes)
        self._num_processors = num_processors(device)

    def suits(self, num_rows: int) -> bool:
        """Whether it is the fastest for a step of ``num_rows``."""
        return num_rows * self._num_heads >= _LEAST_STATES

    def __call__(
        self,
        out: Tensor,
        inputs: DeltaInputs,
        weights: DeltaWeights,
        states: DeltaStates,
        slots: Tensor,
        positions: Tensor,
        *,
        pdl: bool = False,
    ) -> None:
        """As ``delta_step``, with bfloat16 inputs, weights and outputs, and ``positions`` int32."""
        matrices, pending = states.matrices, states.pending
        of_weights = (weights.conv, weights.log_rates, weights.biases, weights.norm)
        assert all(of.dtype == torch.bfloat16 for of in (out, inputs.channels, *of_weights))
        assert slots.dtype == torch.int64 and positions.dtype == torch.int32
        assert matrices.dtype == self._state_dtype
        assert all(of.stride(-1) == 1 for of in (inputs.channels, inputs.z, inputs.a, inputs.b))
        assert inputs.z.stride(1) == HEAD_DIM
        assert matrices.shape[1:] == (self._num_heads, HEAD_DIM, HEAD_DIM)
        assert all(of.is_contiguous() for of in (out, *of_weights, states.conv[0], matrices[0]))
        arguments = _Arguments(
            out=address(out),
            x=address(inputs.channels),
            z=address(inputs.z),
            a=address(inputs.a),
            b=address(inputs.b),
            conv=address(weights.conv),
            log_rates=address(weights.log_rates),
            biases=address(weights.biases),
            norm=address(weights.norm),
            inputs=address(states.conv),
            states=address(matrices),
            keys=address(pending.keys),
            corrections=address(pending.values),
            decays=address(pending.decays),
            begins=address(pending.begins),
            slots=address(slots),
            positions=address(positions),
            x_stride=inputs.channels.stride(0),
            z_stride=inputs.z.stride(0),
            a_stride=inputs.a.stride(0),
            b_stride=inputs.b.stride(0),
            inputs_stride=states.conv.stride(0),
            states_stride=matrices.stride(0) * matrices.itemsize,
            num_rows=len(slots),
            eps=weights.eps,
        )
        grid = min(len(slots) * self._num_key_heads, self._num_processors), 1, 1
        self._kernel.launch(grid, _THREADS, arguments, pdl=pdl)
