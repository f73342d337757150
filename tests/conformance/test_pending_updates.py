"""Engines whose decode steps leave updates of recurrent states pending, as kernels for many rows do
on a GPU, give the tokens of those that write each state."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.kernels.causal_conv import causal_conv_step_reference
from minisgl_backend.kernels.gated_delta import DeltaInputs, DeltaStates, DeltaWeights
from minisgl_backend.kernels.layer_states import LayerStates
from minisgl_backend.kernels.mamba import MambaInputs, MambaWeights
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.gated_delta_net import GatedDeltaNet
from minisgl_backend.plan import WHOLE_EVERY
from minisgl_backend.request import SamplingParams
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes

PROMPTS: Final = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7, count=12)
SAMPLING: Final = SamplingParams(max_tokens=30, temperature=0.0)


class PendingSteps:
    """States of rows that lack the updates of their last tokens.

    A whole state is [num_heads, key_dim, value_dim]; in slots it may be ``transposed``.
    """

    transposed = False

    def __init__(self) -> None:
        self.num_left = self.num_written = 0

    def found(self, states: LayerStates, slot: int, place: int) -> Tensor:
        """The whole state of a row before its token of this place."""
        pending, state = states.pending, states.matrices[slot].clone()
        state = state.mT if self.transposed else state
        begin = int(pending.begins[slot, 0])
        assert begin <= place and (pending.begins[slot] == begin).all()
        if begin == place:
            return state
        behind = slice(begin, place)
        decays = pending.decays[slot, :, behind, None]  # [num_heads, count, 1]
        left = (decays[:, -1:] - decays).exp() * pending.values[slot, :, behind]
        keys = pending.keys[slot, :, behind]
        keys = keys.repeat_interleave(len(state) // len(keys), 0)
        return state * decays[:, -1:].exp() + keys.mT @ left

    def leave(
        self,
        states: LayerStates,
        slot: int,
        position: int,
        state: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
    ) -> None:
        """Write the state if the next position is a multiple of ``WHOLE_EVERY``."""
        pending, place = states.pending, position % WHOLE_EVERY
        if (position + 1) % WHOLE_EVERY == 0:
            states.matrices[slot] = state.mT if self.transposed else state
            pending.begins[slot] = 0
            self.num_written += 1
            return
        if place > pending.begins[slot, 0]:
            log_decay = log_decay + pending.decays[slot, :, place - 1]
        pending.keys[slot, :, place] = key
        pending.values[slot, :, place] = value
        pending.decays[slot, :, place] = log_decay
        self.num_left += 1


class DeltaSteps(PendingSteps):
    """What ``DeltaStepKernel`` does, row by row."""

    def suits(self, num_rows: int) -> bool:
        return True

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
        num_heads, key_dim, value_dim = states.matrices.shape[1:]
        size, sharing = weights.num_key_heads * key_dim, num_heads // weights.num_key_heads
        mixed = torch.empty_like(inputs.channels)
        causal_conv_step_reference(mixed, inputs.channels, states.conv, slots, weights.conv)
        log_decays = -weights.log_rates.exp() * F.softplus(inputs.a + weights.biases)
        rates = inputs.b.sigmoid()
        for row, (slot, position) in enumerate(zip(slots, positions.tolist(), strict=False)):
            q, k = (part.view(-1, key_dim) for part in mixed[row, : 2 * size].chunk(2))
            key, query = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (k, q))
            v = mixed[row, 2 * size :].view(num_heads, value_dim)
            of_heads = key.repeat_interleave(sharing, 0), query.repeat_interleave(sharing, 0)
            state = self.found(states, int(slot), position % WHOLE_EVERY)
            state *= log_decays[row].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", of_heads[0], state)
            correction = (v - known) * rates[row][:, None]
            state += of_heads[0][..., None] * correction[:, None]
            self.leave(states, int(slot), position, state, key, correction, log_decays[row])
            read = torch.einsum("hk,hkv->hv", of_heads[1], state) * key_dim**-0.5
            normed = F.rms_norm(read, (value_dim,), weights.norm, weights.eps)
            out[row] = normed * F.silu(inputs.z[row])

    def take(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compute the decode steps of ``model``."""
        mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GatedDeltaNet)]
        assert mixers
        for mixer in mixers:
            mixer.use_step_kernel(cast(Any, self))


class MambaSteps(PendingSteps):
    """What the kernels of ``mamba_step`` for many rows do, row by row."""

    transposed = True

    def __call__(
        self,
        out: Tensor,
        inputs: MambaInputs,
        weights: MambaWeights,
        states: LayerStates,
        slots: Tensor,
        positions: Tensor,
        *,
        pdl: bool = False,
    ) -> None:
        num_heads, head_dim, state_size = states.matrices.shape[1:]
        groups, inner = weights.num_groups, num_heads * head_dim
        mixed = torch.empty_like(inputs.channels)
        causal_conv_step_reference(
            mixed, inputs.channels, states.conv, slots, weights.conv, weights.conv_bias
        )
        steps = F.softplus(inputs.steps + weights.biases).clamp(*weights.time_steps)
        log_decays = -weights.log_rates.exp() * steps
        for row, (slot, position) in enumerate(zip(slots, positions.tolist(), strict=False)):
            x = mixed[row, :inner].view(num_heads, head_dim)
            key, reader = mixed[row, inner:].view(2, groups, state_size)
            of_heads = (each.repeat_interleave(num_heads // groups, 0) for each in (key, reader))
            keys, readers = of_heads
            value = steps[row][:, None] * x
            state = self.found(states, int(slot), position % WHOLE_EVERY)
            state = state * log_decays[row].exp()[:, None, None]
            state += keys[..., None] * value[:, None]
            self.leave(states, int(slot), position, state, key, value, log_decays[row])
            read = torch.einsum("hk,hkv->hv", readers, state) + weights.skips[:, None] * x
            opened = (read.flatten() * F.silu(inputs.z[row])).view(groups, -1)
            assert weights.norm is not None
            normed = F.rms_norm(opened, opened.shape[1:], None, weights.eps)
            out[row] = normed.flatten() * weights.norm

    def take(self, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compute the decode steps of ``model``."""
        monkeypatch.setattr("minisgl_backend.models.mamba.mamba_step", self)


@pytest.mark.parametrize(("case", "kind"), [("qwen3.5", DeltaSteps), ("nemotron-h", MambaSteps)])
@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 16},
        {"page_size": 1, "chunk": 5},
        {"page_size": 4, "overlap": False},
        {"page_size": 16, "num_positions": 256, "reserve_tokens": 1},
    ],
    ids=["pages", "single positions", "small pages", "retracted"],
)
def test_tokens_are_equal(
    case: str,
    kind: type[DeltaSteps | MambaSteps],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a cold cache and a warm one; prompts begin from what rows kept while they decoded."""
    write_checkpoint(case, tmp_path)
    steps, outcomes = kind(), []
    for has_kernel in (False, True):
        model = load_model(tmp_path, context=CONTEXT)
        if has_kernel:
            steps.take(model, monkeypatch)
        with TinyEngine(model, context=CONTEXT, num_snapshots=60, **options) as engine:
            first = engine.run(PROMPTS, [SAMPLING] * len(PROMPTS))
            longer = [
                torch.cat([torch.from_numpy(prompt), torch.tensor(answer)]).int().numpy()
                for prompt, answer in zip(PROMPTS, first.tokens, strict=True)
            ]
            second = engine.run(longer, [SAMPLING] * len(longer))
            assert second.num_cached_tokens > 0
            assert (engine.num_retractions > 0) == ("reserve_tokens" in options)
        outcomes.append(first.tokens + second.tokens)
    assert outcomes[0] == outcomes[1]
    assert steps.num_left > 4 * steps.num_written > 0
