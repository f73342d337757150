"""Recurrent layers in steps that check guesses, against steps of one token a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl_backend.execution.states import StateStorage
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.spec import DeltaSpec
from minisgl_backend.models.token_mixing import RecurrentRows, StepContext
from tests.conformance.checkpoints import CONTEXT, write_checkpoint
from tests.conformance.engines import load_model
from tests.unit.kernels.checks import checks_of, of_layer, unsettled_tokens


def mixed(mixer: RecurrentMixer, x: Tensor, rows: RecurrentRows) -> Tensor:
    """What the layer adds to the residual stream. It reads no pages."""
    places = torch.arange(len(x))
    step = StepContext(
        TokenPlaces(places, places, torch.empty(0)), lambda *_: x, pdl=False, recurrent=rows
    )
    added, _ = mixer(torch.zeros_like(x), Normed(x), RMSNorm(x.shape[1], 1e-6), step)
    assert isinstance(added, Tensor)
    return added


@pytest.mark.parametrize("case", ["qwen3.5", "kimi-linear"])
@torch.inference_mode()
def test_tokens_of_checks_read_what_steps_read(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    torch.manual_seed(5)
    model = load_model(tmp_path, context=CONTEXT)
    shape = model.spec.recurrent
    assert isinstance(shape, DeltaSpec)
    storage = StateStorage(
        shape,
        num_rows=3,
        num_snapshots=0,
        dtype=torch.float32,
        state_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    first = next(layer.mixer for layer in model.layers if isinstance(layer.mixer, RecurrentMixer))
    states = storage.layers[0]
    for of_slots in (states.conv, states.matrices):
        of_slots.normal_()
    sizes = shape.num_channels, shape.num_key_heads, *shape.matrices
    by_dimension = not shape.updates[0]
    unsettled = unsettled_tokens(1, 2, 3, *sizes, num_decays=shape.key_dim if by_dimension else 1)
    slots, checks = checks_of([3, 0, 1], [2, -1, 0], [1, -1, 0])
    x = torch.randn(len(slots), model.spec.hidden_size)
    first.bind(replace(states, unsettled=of_layer(unsettled, 0)))
    found = mixed(first, x, RecurrentRows(slots, checks=checks))
    assert found.isfinite().all()
    for begin, length, _ in checks.listed():
        for token in range(begin, begin + length):
            one = slice(token, token + 1)
            wanted = mixed(first, x[one], RecurrentRows(slots[one]))
            torch.testing.assert_close(found[one], wanted, rtol=1e-4, atol=1e-5)
