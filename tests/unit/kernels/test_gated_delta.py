"""Gated DeltaNet, in blocks and token by token, against the functions of ``transformers``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from minisgl_backend.kernels.causal_conv import causal_conv, causal_conv_step_reference
from minisgl_backend.kernels.chunk_runs import Run, Runs
from minisgl_backend.kernels.gated_delta import (
    DeltaInputs,
    DeltaStates,
    DeltaWeights,
    delta_checks,
    delta_rule,
    delta_rule_step,
    delta_runs,
    delta_step,
)
from minisgl_backend.kernels.layer_states import PendingUpdates
from minisgl_backend.kernels.settle import settle
from tests.checks import CHECKS, arranged, layered, nothing_kept, settling

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 8, 16


def inputs(num_tokens: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(num_tokens)
    q, k = torch.randn(2, num_tokens, KEY_HEADS, KEY_DIM, generator=draw)
    v = torch.randn(num_tokens, HEADS, VALUE_DIM, generator=draw)
    g = -torch.rand(num_tokens, HEADS, generator=draw) * 3
    beta = torch.rand(num_tokens, HEADS, generator=draw)
    return q, k, v, g, beta


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 200])
def test_the_rule_is_that_of_transformers(num_tokens: int) -> None:
    q, k, v, g, beta = inputs(num_tokens)
    state = torch.randn(HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(1))
    expected, behind = theirs.torch_recurrent_gated_delta_rule(
        *(each[None] for each in (q, k, v, g, beta)),
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, last = delta_rule(q, k, v, g, beta, state)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, behind[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 63, 65, 130])
@pytest.mark.parametrize("strength", [0.1, 30.0])
def test_decays_by_dimension_are_those_of_transformers(num_tokens: int, strength: float) -> None:
    """Even where a dimension loses all within a few tokens."""
    draw = torch.Generator().manual_seed(num_tokens)
    q, k, v = torch.randn(3, num_tokens, HEADS, KEY_DIM, generator=draw)
    g = -torch.rand(num_tokens, HEADS, KEY_DIM, generator=draw) * strength
    beta = torch.rand(num_tokens, HEADS, generator=draw)
    state = torch.randn(HEADS, KEY_DIM, KEY_DIM, generator=draw)
    expected, behind = kimi.recurrent_kimi_delta_attention(
        *(each[None] for each in (q, k, v, g, beta)),
        initial_state=state[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    found, last = delta_rule(q, k, v, g, beta, state)
    torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, behind[0], rtol=1e-4, atol=1e-5)
    states = state[None].clone()
    for token in range(num_tokens):
        one = slice(token, token + 1)
        slots = torch.tensor([0])
        stepped = delta_rule_step(q[one], k[one], v[one], g[one], beta[one], states, slots)
        torch.testing.assert_close(stepped, expected[0, one], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 16, 64, 99])
def test_tokens_may_be_cut_anywhere(cut: int) -> None:
    q, k, v, g, beta = inputs(100)
    state = torch.zeros(HEADS, KEY_DIM, VALUE_DIM)
    expected, last = delta_rule(q, k, v, g, beta, state)
    first, state = delta_rule(q[:cut], k[:cut], v[:cut], g[:cut], beta[:cut], state)
    rest, state = delta_rule(q[cut:], k[cut:], v[cut:], g[cut:], beta[cut:], state)
    torch.testing.assert_close(torch.cat([first, rest]), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_rows_step_by_their_own_states() -> None:
    q, k, v, g, beta = inputs(3)
    states = torch.randn(6, HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(2))
    before, slots = states.clone(), torch.tensor([4, 0, 2])
    found = delta_rule_step(q, k, v, g, beta, states, slots)
    for row, slot in enumerate(slots.tolist()):
        one = slice(row, row + 1)
        expected, last = delta_rule(q[one], k[one], v[one], g[one], beta[one], before[slot])
        torch.testing.assert_close(found[one], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot], last, rtol=1e-4, atol=1e-5)
    assert torch.equal(states[[1, 3, 5]], before[[1, 3, 5]])


def test_the_convolution_goes_on_where_it_was_cut() -> None:
    draw = torch.Generator().manual_seed(3)
    x, weight = torch.randn(9, 5, generator=draw), torch.randn(5, 4, generator=draw)
    expected = theirs.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    whole, last = causal_conv(x, torch.zeros(5, 3), weight)
    torch.testing.assert_close(whole, expected)
    first, state = causal_conv(x[:2], torch.zeros(5, 3), weight)
    states = torch.zeros(2, 5, 3)
    states[1] = state
    found = torch.cat([first, torch.empty(7, 5)])
    for i in range(2, 9):
        one = slice(i, i + 1)
        causal_conv_step_reference(found[one], x[one], states, torch.tensor([1]), weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(states[1], last)
    assert not states[0].any()


def made_weights(draw: torch.Generator, by_dimension: bool) -> DeltaWeights:
    key_heads, of_decays = (HEADS, (HEADS, KEY_DIM)) if by_dimension else (KEY_HEADS, (HEADS,))
    conv = torch.randn(2 * key_heads * KEY_DIM + HEADS * VALUE_DIM, 4, generator=draw)
    rates, biases = (torch.randn(*of, generator=draw) for of in ((HEADS,), of_decays))
    return DeltaWeights(key_heads, conv, rates, biases, torch.rand(VALUE_DIM, generator=draw), 1e-6)


def made_inputs(draw: torch.Generator, num_tokens: int, weights: DeltaWeights) -> DeltaInputs:
    x = torch.randn(num_tokens, len(weights.conv), generator=draw)
    z = torch.randn(num_tokens, HEADS, VALUE_DIM, generator=draw)
    a, b = (torch.randn(num_tokens, *of, generator=draw) for of in (weights.biases.shape, (HEADS,)))
    return DeltaInputs(x, z, a, b)


@pytest.mark.parametrize("least_decay", [None, -5.0])
def test_decays_are_those_of_transformers(least_decay: float | None) -> None:
    """Without a least one, or with one. Tokens that learn nothing leave states of ones with what
    the decays leave."""
    bailing: Any = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    draw = torch.Generator().manual_seed(6)
    config = bailing.BailingHybridConfig(
        hidden_size=12,
        num_attention_heads=HEADS,
        head_dim=KEY_DIM,
        kda_safe_gate=least_decay is not None,
        kda_lower_bound=least_decay or -1.0,
    )
    gate = bailing.BailingHybridForgetGate(config)
    x = torch.randn(5, 12, generator=draw)
    for parameter in gate.parameters():
        parameter.data.normal_(generator=draw)
    weights = replace(
        made_weights(draw, by_dimension=True),
        log_rates=gate.A_log.data,
        biases=gate.dt_bias.data.view(HEADS, KEY_DIM),
        least_decay=least_decay,
    )
    expected = gate(x[None])[0]
    a = gate.f_proj(x).view(-1, HEADS, KEY_DIM)
    made = made_inputs(draw, 5, weights)
    states = DeltaStates(
        torch.zeros(5, len(weights.conv), 3),
        torch.ones(5, HEADS, KEY_DIM, VALUE_DIM),
        PendingUpdates.none(5, HEADS, HEADS, KEY_DIM, VALUE_DIM),
        torch.zeros(5, HEADS, dtype=torch.int32),
    )
    never = torch.full_like(made.b, -torch.inf)
    slots = torch.arange(5)
    delta_step(made.z.clone(), replace(made, a=a, b=never), weights, states, slots, slots)
    left = expected.exp()[..., None].expand_as(states.matrices)
    torch.testing.assert_close(states.matrices, left)


@pytest.mark.parametrize("by_dimension", [False, True])
def test_runs_give_what_steps_give(by_dimension: bool) -> None:
    """Rows begin or continue from a state; snapshots are kept within runs and at their ends."""
    draw = torch.Generator().manual_seed(4)
    weights = made_weights(draw, by_dimension)
    inputs, key_heads = made_inputs(draw, 170, weights), weights.num_key_heads
    conv = torch.randn(8, len(weights.conv), 3, generator=draw)
    matrices = torch.randn(8, HEADS, KEY_DIM, VALUE_DIM, generator=draw)
    states, before = (
        DeltaStates(
            conv.clone(),
            matrices.clone(),
            PendingUpdates.none(8, key_heads, HEADS, KEY_DIM, VALUE_DIM),
            torch.zeros(8, key_heads, dtype=torch.int32),
        )
        for _ in range(2)
    )
    runs = (
        Run(0, 2, 3, 7, ((1, 5),)),
        Run(2, 80, 1, 0, ((66, 0), (80, 4))),
        Run(80, 90, 2, 5, ((83, 6),)),
        Run(90, 170, 7, 9),
    )
    found = torch.empty_like(inputs.z)
    delta_runs(found, inputs, weights, states, Runs.of(runs, torch.from_numpy))
    before.conv[1], before.matrices[1] = 0.0, 0.0
    for run in runs:
        slot = torch.tensor([run.slot])
        for token in range(run.begin, run.end):
            one = slice(token, token + 1)
            expected = stepped(inputs, one, weights, before, slot)
            torch.testing.assert_close(found[one], expected, rtol=1e-4, atol=1e-5)
            for end, kept in run.kept:
                if end == token + 1:
                    for of_slot in (before.conv, before.matrices):
                        of_slot[kept] = of_slot[run.slot]
    torch.testing.assert_close(states.conv, before.conv)
    torch.testing.assert_close(states.matrices, before.matrices, rtol=1e-4, atol=1e-5)


def stepped(
    inputs: DeltaInputs,
    one: slice,
    weights: DeltaWeights,
    states: DeltaStates,
    slot: torch.Tensor,
) -> torch.Tensor:
    """What the token ``one`` reads in a step of its own."""
    out = inputs.z[one].clone()
    of_token = DeltaInputs(*(of[one] for of in (inputs.channels, inputs.z, inputs.a, inputs.b)))
    delta_step(out, of_token, weights, states, slot, slot)
    return out


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_dimension", [False, True])
def test_checks_give_what_steps_give(by_dimension: bool, state_dtype: torch.dtype) -> None:
    """Rows beside padding check up to seven guesses, of which any number may be right."""
    draw = torch.Generator().manual_seed(5)
    weights = made_weights(draw, by_dimension)
    slots, checks, positions = arranged(CHECKS)
    inputs, key_heads = made_inputs(draw, len(slots) + 3, weights), weights.num_key_heads
    begun = DeltaStates(
        torch.randn(6, len(weights.conv), 3, generator=draw),
        torch.randn(6, HEADS, KEY_DIM, VALUE_DIM, generator=draw).to(state_dtype),
        PendingUpdates.none(6, key_heads, HEADS, KEY_DIM, VALUE_DIM),
        torch.zeros(6, key_heads, dtype=torch.int32),
    )
    kept = nothing_kept(begun, key_heads, 5, 8, keys_are_lines=True, by_dimension=by_dimension)
    tolerance = 1e-4 if state_dtype == torch.float32 else 2e-2
    for count in range(1, 9):
        states, wanted = (
            replace(begun, conv=begun.conv.clone(), matrices=begun.matrices.clone())
            for _ in range(2)
        )
        states = replace(states, unsettled=kept)
        out = torch.full_like(inputs.z, 7.0)
        delta_checks(out, inputs, weights, states, slots, checks, positions)
        assert torch.equal(states.conv, begun.conv)
        assert torch.equal(states.matrices, begun.matrices)
        assert not out[: len(slots)][slots < 0].any() and (out[len(slots) :] == 7).all()
        for begin, length, _ in checks.listed():
            for token in range(begin, begin + min(count, length)):
                one = slice(token, token + 1)
                expected = stepped(inputs, one, weights, wanted, slots[begin : begin + 1])
                torch.testing.assert_close(out[one], expected, rtol=tolerance, atol=tolerance)
        settle(*layered(states), settling(CHECKS, count), keys_are_lines=True)
        torch.testing.assert_close(states.conv, wanted.conv)
        torch.testing.assert_close(states.matrices, wanted.matrices, rtol=tolerance, atol=tolerance)
