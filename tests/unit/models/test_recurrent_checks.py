"""Recurrent layers in steps that check guesses, against steps of one token a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl_backend.execution.states import StateStorage
from minisgl_backend.kernels.chunk_runs import Run, Runs
from minisgl_backend.kernels.gated_delta import DeltaInputs, DeltaWeights, delta_runs
from minisgl_backend.kernels.layer_states import LayerStates
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.models import gated_delta_net
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.recurrent_mixer import RecurrentMixer
from minisgl_backend.models.recurrent_spec import DeltaSpec, KimiDeltaSpec
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import RecurrentRows, StepContext
from minisgl_backend.parallel.group import Group
from tests.checks import CHECKS, arranged, nothing_kept
from tests.conformance.checkpoints import CONTEXT, write_checkpoint
from tests.parallel.threads import on_ranks

CPU = torch.device("cpu")


def no_attention(q: Tensor, kv: PagedKV, layer: int) -> Tensor:
    raise AssertionError("a recurrent layer does not attend")


@pytest.mark.parametrize(
    ("case", "size"),
    [
        ("nemotron-h", 1),
        ("granite-hybrid", 2),  # a norm across ranks
        ("falcon-h1", 2),
        ("lfm2", 1),
        ("lfm2", 2),
        ("qwen3.5", 1),
        ("qwen3-next", 2),
        ("kimi-linear", 2),
        ("bailing-hybrid", 2),
    ],
)
def test_a_step_may_have_checks_beside_a_prompt(case: str, size: int, tmp_path: Path) -> None:
    """Tokens of checks get what they get in steps of their own, and states stay as they are."""
    write_checkpoint(case, tmp_path)
    spec = load_spec(tmp_path)
    on_ranks(size, lambda group: check_first_layer(spec, tmp_path, group))


def test_kimi_delta_attention_has_what_its_spec_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eps of the output's norm and the scale of rates, as in Gated DeltaNet."""
    found: set[tuple[float, float]] = set()

    def run(out: Tensor, inputs: DeltaInputs, weights: DeltaWeights, *others: Any) -> None:
        found.add((weights.eps, weights.rate_scale))
        delta_runs(out, inputs, weights, *others)

    monkeypatch.setattr(gated_delta_net, "delta_runs", run)
    write_checkpoint("kimi-linear", tmp_path)
    spec = load_spec(tmp_path)
    assert isinstance(spec.recurrent, KimiDeltaSpec)
    changed = replace(spec.recurrent, norm_eps=0.25, rate_scale=2.0)
    spec = replace(spec, recurrent=changed)
    on_ranks(1, lambda group: check_first_layer(spec, tmp_path, group))
    assert found == {(0.25, 2.0)}


def check_first_layer(spec: ModelSpec, folder: Path, group: Group) -> None:
    assert spec.recurrent is not None
    of_rank = spec.recurrent.of_rank(group.size)
    model = build_model(
        spec,
        folder,
        dtype=torch.float32,
        device=CPU,
        group=group,
        max_sequence_length=CONTEXT,
        whole_experts=False,
        kernels=KernelChoices(
            fused=False, fused_experts=False, keep_quantized=False, keeps_experts=None
        ),
    )
    mixer = next(of for of in model.modules() if isinstance(of, RecurrentMixer))
    norm = RMSNorm(spec.hidden_size, 1e-5)
    norm.weight.data.fill_(1.0)
    slots, checks, positions = arranged(CHECKS)
    draw = torch.Generator().manual_seed(2)
    prompt = Run(len(slots), len(slots) + 4, slot=4, position=0)
    hidden = torch.randn(prompt.end, spec.hidden_size, generator=draw)
    positions = torch.cat([positions, torch.arange(4)])

    def mixed(tokens: slice, rows: RecurrentRows) -> Tensor:
        """What the layer adds to the residual stream of these tokens."""
        own = positions[tokens]
        places = TokenPlaces(own, own, torch.empty(0))
        step = StepContext(places, no_attention, pdl=False, recurrent=rows)
        residual = torch.zeros_like(hidden[tokens])
        with torch.inference_mode():
            added, _ = mixer(residual, Normed(hidden[tokens]), norm, step)
        assert isinstance(added, Tensor)
        return added

    def made_states() -> LayerStates:
        states = StateStorage(
            of_rank,
            num_rows=5,
            num_snapshots=0,
            dtype=torch.float32,
            state_dtype=torch.float32,
            device=CPU,
            num_checks=0,
            most_tokens=0,
        ).layers[0]
        of_rank_draw = torch.Generator().manual_seed(group.rank)
        for of in (states.conv, states.matrices):
            of.normal_(generator=of_rank_draw)
        kept = nothing_kept(
            states,
            of_rank.updates[0],
            5,
            8,
            keys_are_lines=isinstance(of_rank, DeltaSpec),
            by_dimension=of_rank.by_dimension,
        )
        return replace(states, unsettled=kept)

    begun = made_states()
    mixer.bind(begun)
    runs = Runs.of([prompt], torch.from_numpy)
    found = mixed(slice(None), RecurrentRows(slots, runs, checks))
    stepped = made_states()
    rows = [slot for slot in range(6) if slot != prompt.slot]
    assert torch.equal(begun.conv[rows], stepped.conv[rows])
    assert torch.equal(begun.matrices[rows], stepped.matrices[rows])
    mixer.bind(stepped)
    for begin, length, _ in checks.listed():
        for token in range(begin, begin + length):
            one = slice(token, token + 1)
            expected = mixed(one, RecurrentRows(slots[one]))
            torch.testing.assert_close(found[one], expected, rtol=1e-4, atol=1e-5)
    alone = Runs.of([replace(prompt, begin=0, end=4)], torch.from_numpy)
    expected = mixed(slice(len(slots), None), RecurrentRows(slots[:0], alone))
    torch.testing.assert_close(found[len(slots) :], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(begun.conv[prompt.slot], stepped.conv[prompt.slot])
    torch.testing.assert_close(begun.matrices[prompt.slot], stepped.matrices[prompt.slot])
