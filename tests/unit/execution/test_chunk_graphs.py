"""Graphs of steps with prompt chunks: their sizes, their inputs and what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minisgl_backend.attention import choose
from minisgl_backend.attention.base import AttentionSetting
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution import step_graphs
from minisgl_backend.execution.checks import as_decodes
from minisgl_backend.execution.chunk_graphs import (
    ChunkInputs,
    fill,
    fitting,
    max_chunks,
)
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.forward import ForwardPass
from minisgl_backend.execution.rows import DeviceRows
from minisgl_backend.execution.stages import ExecutorLimits
from minisgl_backend.execution.states import CapturedChecks, CapturedRuns, StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.rows import StepInputs, begin_decode
from minisgl_backend.kernels.settle import Settling
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import LayersOutput
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.plan import LAST_TOKEN, Decodes, Snapshots, StepPlan
from minisgl_backend.progress import unseen
from minisgl_backend.request import IntArray
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.unit.execution.test_flat_batch import ints, plan_of

MAX_ROWS = 9


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Some of ``MAX_ROWS`` rows decode and others prefill, in any order."""
    rows = draw(st.permutations(range(MAX_ROWS)))
    num_decodes = draw(st.integers(0, MAX_ROWS))
    num_chunks = draw(st.integers(0, MAX_ROWS - num_decodes))
    starts, lengths = st.integers(0, 90), st.integers(1, 70)
    decodes = [(row, draw(starts)) for row in rows[:num_decodes]]
    chunks = [(row, draw(starts), draw(lengths), 1) for row in rows[-num_chunks:]]
    return plan_of(chunks if num_chunks else [], decodes)


@given(plans(), st.lists(st.integers(1, 500), min_size=1, unique=True).map(sorted))
def test_sizes_that_hold_a_step(plan: StepPlan, sizes: list[int]) -> None:
    holding = [
        size
        for size in sizes
        if size >= plan.num_tokens and max_chunks(size, MAX_ROWS) >= len(plan.chunks.rows)
    ]
    assert fitting(sizes, FlatBatch.of(plan)) == sorted(holding)


@pytest.mark.parametrize(
    ("num_decodes", "chunk_lengths", "size"),
    [
        (16, [], 16),
        (17, [], 32),
        (65, [], None),
        (0, [16], 16),
        (1, [16], 32),
        (0, [1, 1], 32),
        (0, [1, 1, 1], 64),
        (60, [1, 1, 1, 1], 64),
        (0, [1, 1, 1, 1, 1], None),
    ],
)
def test_sizes_of_steps(num_decodes: int, chunk_lengths: list[int], size: int | None) -> None:
    decodes = [(row, 5) for row in range(num_decodes)]
    chunks = [(num_decodes + i, 0, length, 1) for i, length in enumerate(chunk_lengths)]
    found = fitting([16, 32, 64], FlatBatch.of(plan_of(chunks, decodes)))
    assert min(found, default=None) == size


def test_room_for_chunks() -> None:
    assert [max_chunks(size, 8) for size in (1, 16, 17, 64, 112, 113, 4096)] == [
        1,
        1,
        2,
        4,
        7,
        8,
        8,
    ]


@given(plans(), st.integers(0, 200))
def test_inputs_hold_the_step_and_padding(plan: StepPlan, more: int) -> None:
    batch = FlatBatch.of(plan)
    num_decodes, num_chunks = len(plan.decodes.rows), len(plan.chunks.rows)
    size = max(plan.num_tokens, 16 * num_chunks, 1) + more
    content = fill(size, MAX_ROWS, batch)
    assert content.dtype == np.int32
    inputs = ChunkInputs.of(torch.from_numpy(np.append(content, ints(7, 7))), size, MAX_ROWS)
    assert inputs.buffer.tolist() == content.tolist()

    def padded(values: list[int], padding: int, length: int) -> list[int]:
        return values + [padding] * (length - len(values))

    tokens = [LAST_TOKEN] * num_decodes + plan.chunks.tokens.tolist()
    assert inputs.tokens.tolist() == padded(tokens, 0, size)
    assert inputs.rows.tolist() == padded(batch.rows.tolist(), MAX_ROWS, size)
    assert inputs.positions.tolist() == padded(batch.positions.tolist(), 0, size)

    room = max_chunks(size, MAX_ROWS)
    assert inputs.chunk_rows.tolist() == padded(plan.chunks.rows.tolist(), MAX_ROWS, room)
    ends = plan.chunks.ends.tolist()
    assert inputs.chunk_ends.tolist() == padded(ends, 0, room)
    assert int(inputs.chunk_offsets[0]) == num_decodes
    lengths = padded(plan.chunks.lengths.tolist(), 0, room)
    assert inputs.chunk_offsets.diff().tolist() == lengths

    room = min(size, MAX_ROWS)
    assert inputs.decode_rows.tolist() == padded(plan.decodes.rows.tolist(), MAX_ROWS, room)
    assert inputs.decode_lengths.tolist() == padded((plan.decodes.positions + 1).tolist(), 1, room)


# --- what is captured, by the kernels' twins ---------------------------------------------------

PAGE_SIZE = 4
NUM_PAGES = 64


class Layers:
    """A model with pages for ``MAX_ROWS`` rows, which hold 16 pages each in shuffled order."""

    def __init__(self, folder: Path) -> None:
        spec, self.device = load_spec(folder), CpuDevice()
        cpu, shape = self.device.torch_device, spec.attention_shape(1)
        self.model = build_model(
            spec,
            folder,
            dtype=torch.float32,
            device=cpu,
            group=OneRank(),
            max_sequence_length=CONTEXT,
            kernels=KernelChoices(fused=True),
        )
        self.storage = KVStorage(
            shape, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=torch.float32, device=cpu
        )
        self.rows = DeviceRows(
            self.device,
            max_rows=MAX_ROWS,
            max_sequence_length=CONTEXT,
            page_size=PAGE_SIZE,
            dummy_page=self.storage.dummy_page,
            vocab_size=10,
            dummy_window_page=None,
            most_guesses=0,
            mtp_tokens=0,
        )
        pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(0))
        self.rows.table.pages[:4, :16] = pages.view(4, 16).int()
        setting = AttentionSetting(
            shape=shape,
            page_size=PAGE_SIZE,
            max_sequence_length=CONTEXT,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            max_batch_size=16,
            max_captured_batch_size=MAX_ROWS,
            device=cpu,
        )
        self.attention = choose.choose_attention("triton", setting)
        self.model.bind_pages(self.storage.layers)
        self.states: StateStorage | None = None
        if spec.recurrent is not None:
            self.states = StateStorage(
                spec.recurrent,
                num_rows=MAX_ROWS,
                num_snapshots=2,
                dtype=torch.float32,
                state_dtype=torch.float32,
                device=cpu,
                num_checks=3,
                most_tokens=8,
            )
            self.model.bind_states(self.states.layers)
        self.forward = ForwardPass(
            self.model, self.rows, self.attention, self.device, self.states, adapters=None
        )

    def over_batch(self, plan: StepPlan) -> Tensor:
        if self.states is not None and (due := self.states.take_due(plan)):
            self.states.settle(Settling.of(due, self.device.upload))
        return self.forward.over_batch(FlatBatch.of(plan)).residual

    def over_decodes(self, decodes: Decodes, tokens: IntArray) -> Tensor:
        """As decode graphs compute it."""
        given = StepInputs.empty(len(decodes.rows), 0, torch.device("cpu"))
        lines = np.stack([decodes.rows, tokens, decodes.positions])
        given.lines[:] = torch.from_numpy(lines)
        table = self.rows.table
        step = begin_decode(table, given, lines.shape[1], PAGE_SIZE)
        return self.forward.over_decodes(step, grouped=False, adapted=None, checks=None).residual

    def over_inputs(self, size: int, plan: StepPlan) -> Tensor:
        batch, runs, checks = FlatBatch.of(plan), None, None
        content = fill(size, MAX_ROWS, batch)
        inputs = ChunkInputs.of(torch.from_numpy(content), size, MAX_ROWS)
        if self.states is not None:
            room = partial(max_chunks, max_rows=MAX_ROWS)
            captured = CapturedRuns(self.states, self.device, room, 128)
            assert captured.fits(batch, size)
            captured.write(batch, size)
            runs = captured.view(size)
            if len(lengths := batch.check_lengths):
                own = slice(lengths.sum())
                of_checks = CapturedChecks(self.states, self.device, 128)
                of_checks.write(batch.rows[own], batch.positions[own], lengths, size, [])
                checks = of_checks.begin(min(size, 20))
        return self.forward.over_chunks(
            inputs, grouped=False, adapted=None, runs=runs, checks=checks
        ).residual

    @property
    def memory(self) -> list[Tensor]:
        """Everything that outlives a step, except the dummies."""
        found = [self.storage.pages[0][:, :, :NUM_PAGES]]
        for of_layer in [] if self.states is None else self.states.layers:
            for states in (of_layer.conv, of_layer.matrices):
                found += [states[:MAX_ROWS], states[MAX_ROWS + 1 :]]
        return [tensor for tensor in found if tensor.numel()]

    def copy_of_memory(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.memory]

    def go_back(self, memory: list[Tensor]) -> None:
        """Restore ``memory`` as what outlived earlier steps."""
        for tensor, was in zip(self.memory, memory, strict=True):
            tensor.copy_(was)


@pytest.fixture
def nan_where_unwritten() -> Iterator[None]:
    """``torch.empty`` returns NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "case",
    ["llama-biases", "mistral-window", "qwen3-moe", "qwen3.5", "qwen3-next", "nemotron-h", "lfm2"],
)
@pytest.mark.usefixtures("nan_where_unwritten")
@torch.inference_mode()
def test_padding_changes_nothing(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows decode, one begins its prompt and one continues, in graphs of several sizes."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    layers = Layers(tmp_path)
    rng = np.random.default_rng(0)

    def with_tokens(plan: StepPlan) -> StepPlan:
        plan.chunks.tokens[:] = rng.integers(0, VOCAB_SIZE, len(plan.chunks.tokens))
        return plan

    layers.over_batch(with_tokens(plan_of([(0, 0, 30, 1), (3, 0, 9, 1), (1, 0, 21, 0)], [])))
    layers.rows.table.tokens[:4] = torch.tensor([11, 99, 98, 13], dtype=torch.int32)
    plan = with_tokens(plan_of([(1, 21, 7, 1), (2, 0, 13, 0)], [(3, 9), (0, 30)]))
    snapshots = Snapshots(saved_chunks=ints(0, 1), saved_positions=ints(24, 13), saved=ints(1, 0))
    plan = replace(plan, snapshots=snapshots)
    before = layers.copy_of_memory()
    expected = layers.over_batch(plan)
    assert expected.shape[0] == plan.num_tokens == 22
    after = layers.copy_of_memory()
    # norms of what recurrent heads read magnify rounding errors
    tolerance = 1e-4 if layers.states is None else 1e-3
    assert not any(map(torch.equal, after, before))
    for size in (22, 32, 100):
        layers.go_back(before)
        hidden = layers.over_inputs(size, plan)
        assert hidden.shape == (size, expected.shape[1])
        torch.testing.assert_close(hidden[:22], expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(layers.memory, after, atol=tolerance, rtol=tolerance)
        assert all(tensor.isfinite().all() for tensor in layers.memory)
        assert hidden.isfinite().all()


@pytest.mark.parametrize(
    "case", ["qwen3", "qwen3.5", "nemotron-h", "falcon-h1", "lfm2", "kimi-linear"]
)
@pytest.mark.usefixtures("nan_where_unwritten")
@torch.inference_mode()
def test_steps_of_one_kind(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only prompts, only decoding rows, and no token at all, as when graphs are captured."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    layers = Layers(tmp_path)
    prompts = plan_of([(2, 0, 20, 1), (0, 0, 3, 1)], [])
    hidden = layers.over_inputs(64, prompts)
    torch.testing.assert_close(hidden[:23], layers.over_batch(prompts), atol=1e-4, rtol=1e-4)
    decodes = plan_of([], [(0, 3), (2, 20)])
    before = layers.copy_of_memory()
    expected = layers.over_batch(decodes)
    layers.go_back(before)
    hidden = layers.over_inputs(16, decodes)
    torch.testing.assert_close(hidden[:2], expected, atol=1e-4, rtol=1e-4)
    assert layers.over_inputs(16, plan_of([], [])).isfinite().all()


@pytest.mark.parametrize("case", ["qwen3", "mistral-window", "gpt-oss", "youtu"])
@pytest.mark.usefixtures("nan_where_unwritten")
@torch.inference_mode()
def test_guesses_are_alike_as_chunks_and_as_decoding_rows(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    layers = Layers(tmp_path)
    layers.over_batch(plan_of([(1, 0, 20, 1), (2, 0, 3, 1), (0, 0, 9, 1)], []))
    plan = plan_of([], [(0, 9)], [(1, 20, 6), (2, 3, 2)])
    plan.checks.tokens[:] = torch.arange(8).numpy()
    layers.rows.table.tokens[0], layers.rows.table.lengths[0] = 11, 9
    before = layers.copy_of_memory()
    expected = layers.over_batch(plan).roll(-1, 0)  # there the row without guesses comes first
    after = layers.copy_of_memory()
    layers.go_back(before)
    decodes, tokens, _ = as_decodes(plan)
    torch.testing.assert_close(layers.over_decodes(decodes, tokens), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layers.memory, after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h", "falcon-h1", "lfm2", "kimi-linear"])
@pytest.mark.usefixtures("nan_where_unwritten")
@torch.inference_mode()
def test_guesses_beside_prompts(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows check guesses, one decodes beside them, and one begins its prompt; then the first
    two go on after different numbers of guesses."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    layers = Layers(tmp_path)
    layers.over_batch(plan_of([(1, 0, 20, 1), (2, 0, 3, 1), (0, 0, 9, 1)], []))
    plan = plan_of([(3, 0, 7, 1)], [(0, 9)], [(1, 20, 6), (2, 3, 2)])
    plan.checks.tokens[:] = torch.arange(8).numpy()
    after = plan_of([(3, 7, 2, 1)], [(0, 10), (1, 23), (2, 5)])
    before = layers.copy_of_memory()
    expected, then = layers.over_batch(plan), layers.over_batch(after)
    kept = layers.copy_of_memory()
    for size in (33, 64, 100):  # there must be room for three chunks
        layers.go_back(before)
        hidden = layers.over_inputs(size, plan)
        torch.testing.assert_close(hidden[: plan.num_tokens], expected, atol=1e-3, rtol=1e-3)
        assert hidden.isfinite().all()
        torch.testing.assert_close(layers.over_batch(after), then, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(layers.memory, kept, atol=1e-3, rtol=1e-3)


# --- what has to fit beside the graphs -----------------------------------------------------------


class NoGraphs:
    """``ChunkGraphs`` that hold no step."""

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def size_for(self, batch: FlatBatch) -> None:
        return None


@pytest.mark.parametrize("max_prefill_tokens", [100, 2 * CONTEXT + 40])
def test_the_longest_step_has_to_fit_beside_the_graphs(
    max_prefill_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fills all rows: those without a chunk decode."""
    num_chunks = -(-max_prefill_tokens // CONTEXT)
    num_tokens = max_prefill_tokens + MAX_ROWS - num_chunks
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    monkeypatch.setattr(step_graphs, "ChunkGraphs", NoGraphs)
    write_checkpoint("qwen3", tmp_path)
    layers = Layers(tmp_path)
    device: Any = layers.device
    device.is_host = False
    device.free_memory = lambda: 3 * 2**29
    over_batch = ForwardPass.over_batch
    lengths = []

    def short_of_memory(self: ForwardPass, batch: FlatBatch) -> LayersOutput:
        lengths.append(len(batch.rows))
        if lengths.count(num_tokens) == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return over_batch(self, batch)

    monkeypatch.setattr(ForwardPass, "over_batch", short_of_memory)
    too_long = f"a step of {num_tokens} tokens does not fit .*, with 1.5 GiB free: lower memory_"
    with pytest.raises(ConfigError, match=too_long):
        ModelExecutor(
            layers.model,
            storage=layers.storage,
            attention=layers.attention,
            device=device,
            limits=ExecutorLimits(
                max_rows=MAX_ROWS,
                max_sequence_length=CONTEXT,
                max_prefill_tokens=max_prefill_tokens,
                chunk_graph_sizes=(16,),
            ),
            states=None,
            adapter_slots=None,
            adapter_store=None,
            watch_logits=None,
            progress=unseen,
        )
    device.close()
    assert lengths[:4] == [num_tokens, 64, 1, 1]
    assert lengths[-1] == num_tokens
