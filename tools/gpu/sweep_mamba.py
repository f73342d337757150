"""``python3 -m tools.gpu.sweep_mamba GROUPS HEADS HEAD_DIM STATE_SIZE ROWS``: a layer of Mamba 2.

Measures its decode step as ``sweep_delta`` does, with the kernels that write all states and with
those that write a state after every eighth token. The shape is 8 64 64 128 for Nemotron 3 Nano and
1 24 128 256 for Falcon-H1 7B; ROWS such as 1,8,64,256.
"""

from __future__ import annotations

import math
import sys
from functools import partial

import torch
from torch import Tensor

from minisgl_backend.kernels.layer_states import LayerStates, PendingUpdates
from minisgl_backend.kernels.mamba import MambaInputs, MambaWeights, mamba_step
from tools.gpu.sweep_delta import (
    DTYPES,
    NUM_LAYERS,
    WIDTH,
    microseconds,
    microseconds_of_reading,
)

Layer = tuple[Tensor, MambaInputs, MambaWeights, LayerStates]
"""The output, and what it is computed from."""


def made_layer(
    shape: tuple[int, int, int, int], num_rows: int, dtype: torch.dtype, device: torch.device
) -> Layer:
    """Random inputs, weights and states; nothing is pending."""
    groups, heads, head_dim, state_size = shape
    inner = heads * head_dim
    channels = inner + 2 * groups * state_size

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    parts = [inner, channels, heads]
    weights = MambaWeights(
        num_groups=groups,
        conv=normal(channels, WIDTH),
        conv_bias=normal(channels),
        log_rates=normal(heads),
        biases=normal(heads),
        skips=normal(heads),
        norm=normal(inner),
        eps=1e-5,
        time_steps=(0.0, math.inf),
    )
    states = LayerStates(
        conv=normal(num_rows, channels, WIDTH - 1),
        matrices=normal(num_rows, heads, head_dim, state_size).to(dtype),
        pending=PendingUpdates.none(num_rows, groups, heads, state_size, head_dim, device),
    )
    inputs = MambaInputs(*torch.split(normal(num_rows, sum(parts)), parts, dim=1))
    return normal(num_rows, inner), inputs, weights, states


@torch.inference_mode()
def sweep(shape: tuple[int, int, int, int], sizes: list[int], device: torch.device) -> None:
    for dtype in DTYPES:
        print(f"{str(dtype).removeprefix('torch.')}: rows, every token, every eighth, reading")
        for num_rows in sizes:
            layers = [made_layer(shape, num_rows, dtype, device) for _ in range(NUM_LAYERS)]
            runs = (partial(mamba_step, leaves=leaves) for leaves in (False, True))
            times = [microseconds(run, layers, num_rows) for run in runs]
            reading = microseconds_of_reading(layers[0][3])
            print(f"{num_rows:6}", *(f"{time:8.1f}" for time in (*times, reading)), flush=True)


if __name__ == "__main__":
    groups, heads, head_dim, state_size = (int(size) for size in sys.argv[1:5])
    rows = [int(size) for size in sys.argv[5].split(",")]
    sweep((groups, heads, head_dim, state_size), rows, torch.device("cuda"))
