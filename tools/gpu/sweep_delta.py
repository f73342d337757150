"""``python3 -m tools.gpu.sweep_delta HEADS ROWS``: a layer's decode step of Gated DeltaNet.

For the GPU machine, in the repository's root, after ``source tools/gpu/activate.sh``. HEADS is the
number of value heads, 32 for Qwen3.6-35B-A3B and 48 for Qwen3.6-27B, which share 16 key heads; ROWS
such as 1,64,256. Both kernels are timed, over states of each type, in a captured graph of several
layers, whose states are too large for the L2 cache unless rows are few. Rows have random positions,
so each step writes an eighth of the states that the kernel for many rows reads. The table has
microseconds per layer, as means, and the time that reading all states once takes at 4.8 TB/s.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.delta_step import HEAD_DIM, DeltaStepKernel
from minisgl_backend.kernels.gated_delta import (
    DeltaInputs,
    DeltaStates,
    DeltaWeights,
    delta_step,
)
from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates
from minisgl_backend.plan import WHOLE_EVERY

KEY_HEADS: Final = 16
WIDTH: Final = 4
NUM_LAYERS: Final = 4
NUM_STEPS: Final = 4 * WHOLE_EVERY
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
BYTES_PER_US: Final = 4.8e6

Layer = tuple[Tensor, DeltaInputs, DeltaWeights, DeltaStates]
"""The output, and what it is computed from."""


def made_layer(num_heads: int, num_rows: int, dtype: torch.dtype, device: torch.device) -> Layer:
    """Random inputs, weights and states; nothing is pending."""
    num_channels = (2 * KEY_HEADS + num_heads) * HEAD_DIM

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    parts = [num_channels, num_heads * HEAD_DIM, num_heads, num_heads]
    channels, z, b, a = torch.split(normal(num_rows, sum(parts)), parts, dim=1)
    inputs = DeltaInputs(channels, z.view(num_rows, num_heads, HEAD_DIM), a, b)
    weights = DeltaWeights(
        num_key_heads=KEY_HEADS,
        conv=normal(num_channels, WIDTH),
        log_rates=normal(num_heads),
        biases=normal(num_heads),
        norm=normal(HEAD_DIM),
        eps=1e-6,
    )
    states = DeltaStates(
        conv=normal(num_rows, num_channels, WIDTH - 1),
        matrices=normal(num_rows, num_heads, HEAD_DIM, HEAD_DIM).to(dtype),
        readers=torch.zeros(num_rows, KEY_HEADS, dtype=torch.int32, device=device),
        pending=PendingUpdates.none(num_rows, KEY_HEADS, num_heads, HEAD_DIM, HEAD_DIM, device),
    )
    return normal(num_rows, num_heads, HEAD_DIM), inputs, weights, states


def microseconds(
    run: Callable[..., None],
    layers: Sequence[tuple[Tensor, Any, Any, LayerStates]],
    num_rows: int,
) -> float:
    """By layer, of ``run``, which takes what layers have, slots and positions."""
    device = layers[0][0].device
    slots = torch.arange(num_rows, device=device)
    positions = torch.randint(1000, (num_rows,), dtype=torch.int32, device=device)
    for *_, states in layers:
        states.pending.begins.copy_((positions % WHOLE_EVERY)[:, None])

    def step() -> None:
        for out, inputs, weights, states in layers:
            run(out, inputs, weights, states, slots, positions, pdl=True)
        positions.add_(1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    event: Any = torch.cuda.Event
    events = [event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    graph.replay()
    for each in events[:-1]:
        each.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times: list[float] = [first.elapsed_time(last) for first, last in pairwise(events)]
    return 1e3 * statistics.mean(times) / len(layers)


def microseconds_of_reading(states: LayerStates) -> float:
    """That memory needs to read all matrices once."""
    return states.matrices.nbytes / BYTES_PER_US


@torch.inference_mode()
def sweep(num_heads: int, sizes: list[int], device: torch.device) -> None:
    for dtype in DTYPES:
        kernel = DeltaStepKernel(KEY_HEADS, num_heads, WIDTH, dtype, device)
        print(f"{str(dtype).removeprefix('torch.')}: rows, every token, every eighth, reading")
        for num_rows in sizes:
            layers = [made_layer(num_heads, num_rows, dtype, device) for _ in range(NUM_LAYERS)]
            times = [microseconds(run, layers, num_rows) for run in (delta_step, kernel)]
            reading = microseconds_of_reading(layers[0][3])
            print(f"{num_rows:6}", *(f"{time:8.1f}" for time in (*times, reading)), flush=True)


if __name__ == "__main__":
    sweep(int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")], torch.device("cuda"))
