"""Which implementation a call takes, Triton or the twin, and what both need: facts about the
device, and the precision of twins."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Whether the Triton language can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on any device: a way to test them on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(x: Tensor) -> bool:
    """Whether kernels over ``x`` take the Triton path: it is on a GPU and Triton is installed."""
    return (x.is_cuda or is_interpreted()) and has_triton()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor; enough for anything in the interpreter."""
    if device.type != "cuda":
        return 1 << 20
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@functools.cache
def can_start_early(device: torch.device) -> bool:
    """Whether kernels on this device can be launched before their predecessors have ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in the precision in which twins compute: float32, or float64 if it is float64."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
