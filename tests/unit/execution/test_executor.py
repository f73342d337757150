"""The executor with hand-written plans: what one row does must not affect another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionSetting, Chunks
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.stages import ExecutorLimits
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.execution.warm_up import WarmUp
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import parse_spec
from minisgl_backend.models.decoder import Decoder, LayersOutput
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.plan import (
    NO_TOKEN,
    TO_SAMPLE,
    Admission,
    Checks,
    Copies,
    Decodes,
    Grants,
    Pending,
    PromptChunks,
    SampledTokens,
    StepPlan,
)
from minisgl_backend.progress import unseen
from minisgl_backend.request import IntArray, RequestId, SamplingParams
from minisgl_backend.runtime.ports import Executor

PAGE_SIZE: Final = 4
POISON: Final = 99
"""A token whose embedding is NaN."""
SPEC: Final = parse_spec(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
)
PROMPT: Final = (5, 6, 7, 8, 9, 10)
OTHER: Final = (60, 61, 62)


def _ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    model = build_model(
        SPEC,
        Path("nowhere"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        group=OneRank(),
        load_format="dummy",
        seed=1,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(20)
        model.get_parameter("model.embed_tokens.matrix.weight")[POISON] = math.nan
    return model


@pytest.fixture
def executor(model: Decoder) -> Iterator[ModelExecutor]:
    shape, device = SPEC.attention_shape(), CpuDevice(num_threads=1)
    cpu, dtype = device.torch_device, torch.float32
    storage = KVStorage(shape, num_pages=32, page_size=PAGE_SIZE, dtype=dtype, device=cpu)
    model.bind_pages(storage.layers)
    setting = AttentionSetting(
        shape=shape,
        page_size=PAGE_SIZE,
        max_sequence_length=32,
        dtype=dtype,
        kv_dtype=dtype,
        max_batch_size=4,
        max_captured_batch_size=0,
        device=cpu,
    )
    executor = ModelExecutor(
        model,
        storage=storage,
        attention=choose_attention(None, setting),
        device=device,
        limits=ExecutorLimits(
            max_rows=4, max_sequence_length=32, max_prefill_tokens=32, most_guesses=8
        ),
        states=None,
        adapter_slots=None,
        adapter_store=None,
        watch_logits=None,
        progress=unseen,
    )
    yield executor
    executor.close()


class Driver:
    """Writes plans for one executor; each row gets pages of its own, or the given ones."""

    def __init__(self, executor: Executor):
        self.executor = executor
        self.step = 0

    def prefill(
        self,
        row: int,
        tokens: tuple[int, ...],
        *,
        pages: tuple[int, ...],
        start: int = 0,
        is_last: bool = True,
        sampling: SamplingParams | None = None,
        decode: tuple[tuple[int, int], ...] = (),
        released: tuple[int, ...] = (),
        broken: tuple[int, ...] = (),
    ) -> Pending:
        """Prefill one chunk of a row, admitting it at ``start`` 0, while others decode."""
        admission = _admission(
            row=row,
            num_prompt_tokens=start + len(tokens),
            sampling=sampling,
            history=tokens if sampling is not None and sampling.has_penalties else (),
        )
        return self.launch(
            released_rows=_ints(*released),
            broken_pages=_ints(*broken),
            admissions=(admission,) if start == 0 else (),
            grants=_grants(row, *pages),
            chunks=_chunk(row, start, tokens, is_last=is_last),
            decodes=_decodes(*decode),
        )

    def decode(self, *rows: tuple[int, int]) -> Pending:
        """Decode (row, position) pairs."""
        return self.launch(decodes=_decodes(*rows))

    def launch(self, **parts: Any) -> Pending:
        plan = StepPlan(step=self.step, **parts)
        self.step += 1
        return self.executor.launch(plan)


def _grants(row: int, *pages: int) -> Grants:
    """The first pages of a row."""
    return Grants(_ints(*[row] * len(pages)), _ints(*range(len(pages))), _ints(*pages))


def _chunk(row: int, start: int, tokens: tuple[int, ...], *, is_last: bool = True) -> PromptChunks:
    next_token = TO_SAMPLE if is_last else 7
    return PromptChunks(
        _ints(row), _ints(start), _ints(len(tokens)), _ints(next_token), _ints(*tokens)
    )


def _decodes(*places: tuple[int, int]) -> Decodes:
    """Decodes of (row, position) pairs."""
    return Decodes(_ints(*(row for row, _ in places)), _ints(*(at for _, at in places)))


def _tokens(pending: Pending) -> list[int]:
    tokens: list[int] = pending.tokens().token_ids.tolist()
    return tokens


def _admission(
    *,
    row: int,
    num_prompt_tokens: int,
    num_cached_tokens: int = 0,
    sampling: SamplingParams | None = None,
    history: tuple[int, ...] = (),
) -> Admission:
    return Admission(
        request_id=RequestId(100 + row),
        row=row,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        sampling=sampling or SamplingParams(temperature=0.0),
        history=_ints(*history),
    )


def _alone(
    executor: ModelExecutor, count: int, sampling: SamplingParams | None = None
) -> list[int]:
    """How ``PROMPT`` continues, undisturbed, in row 3."""
    driver = Driver(executor)
    tokens = _tokens(driver.prefill(3, PROMPT, pages=(20, 21, 22, 23), sampling=sampling))
    for step in range(count - 1):
        tokens += _tokens(driver.decode((3, len(PROMPT) + step)))
    assert len(set(tokens)) >= min(count, 3)  # otherwise a wrong context could go unnoticed
    return tokens


def test_chunks_and_decodes_of_several_rows(executor: ModelExecutor) -> None:
    expected = _alone(executor, 6)
    driver = Driver(executor)
    first = driver.prefill(0, PROMPT[:3], pages=(7, 2, 9, 4), is_last=False)
    assert _tokens(first) == []
    # Each step is launched before the tokens of earlier steps are read.
    pending = [
        driver.prefill(0, PROMPT[3:], pages=(), start=3),
        driver.prefill(1, OTHER, pages=(11, 12, 13), decode=((0, 6),)),
        driver.decode((1, 3), (0, 7)),
        driver.decode((0, 8), (1, 4)),
        driver.decode((0, 9)),
        driver.decode((0, 10)),
    ]
    found = [_tokens(step) for step in pending]
    own = [0, 1, 1, 0, 0, 0]  # where row 0 stands among each step's samples
    assert [tokens[index] for tokens, index in zip(found, own, strict=True)] == expected


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, num_logprobs=0),
        SamplingParams(temperature=1.5, top_p=0.9, seed=3),
        SamplingParams(temperature=1.0, seed=4, logit_bias=((50, 2.0),), num_logprobs=1),
        SamplingParams(
            temperature=0.0, repetition_penalty=1.6, presence_penalty=3.0, frequency_penalty=2.0
        ),
    ],
    ids=["greedy", "sampled", "biased", "penalized"],
)
def test_guesses_are_checked_by_what_decoding_samples(
    executor: ModelExecutor, sampling: SamplingParams
) -> None:
    """Two of four are right; then the row decodes on."""
    expected = _alone(executor, 8, sampling)
    driver = Driver(executor)
    assert _tokens(driver.prefill(0, PROMPT, pages=(7, 2, 9, 4), sampling=sampling)) == [
        expected[0]
    ]
    wrong = (expected[3] + 1) % POISON
    step = driver.launch(
        admissions=(_admission(row=1, num_prompt_tokens=3),),
        grants=_grants(1, 11, 12, 13),
        checks=Checks(_ints(0), _ints(6), _ints(5), _ints(*expected[:3], wrong, 5)),
        chunks=_chunk(1, 0, OTHER),
    ).tokens()
    sampled: list[int] = step.token_ids.tolist()
    assert sampled[:3] == expected[1:4]
    asked = sampling.num_logprobs is not None
    assert step.logprobs.keys() == (set(range(5)) if asked else set())
    both = _tokens(driver.decode((0, 9), (1, 3)))
    again = _tokens(driver.decode((0, 10), (1, 4)))
    tokens = [both[0], again[0], *_tokens(driver.decode((0, 11)))]
    assert tokens == expected[4:7]
    other = _tokens(driver.prefill(2, OTHER, pages=(15, 16)))
    other += _tokens(driver.decode((2, 3))) + _tokens(driver.decode((2, 4)))
    assert [sampled[5], both[1], again[1]] == other


def test_a_shared_prefix_is_read_not_written(executor: ModelExecutor) -> None:
    expected = _alone(executor, 3)
    driver = Driver(executor)
    _tokens(driver.prefill(0, PROMPT[:4], pages=(1,)))
    admission = _admission(row=1, num_prompt_tokens=len(PROMPT), num_cached_tokens=4)
    tokens = _tokens(
        driver.launch(
            admissions=(admission,),
            grants=_grants(1, 1, 5, 6),
            chunks=_chunk(1, 4, PROMPT[4:]),
        )
    )
    tokens += _tokens(driver.decode((1, 6))) + _tokens(driver.decode((1, 7)))
    assert tokens == expected


def test_the_rest_of_a_prompt_is_copied_from_another_row(executor: ModelExecutor) -> None:
    """Only the named positions of the page are copied: NaN after them stays where it is."""
    expected = _alone(executor, 3)
    driver = Driver(executor)
    _tokens(driver.prefill(0, PROMPT[:5], pages=(1, 9), is_last=False))
    _tokens(driver.prefill(0, (POISON,), pages=(), start=5))
    admission = _admission(row=1, num_prompt_tokens=len(PROMPT), num_cached_tokens=5)
    tokens = _tokens(
        driver.launch(
            admissions=(admission,),
            grants=_grants(1, 5, 6, 7),
            copies=Copies(sources=_ints(1, 9), targets=_ints(5, 6), lengths=_ints(4, 1)),
            chunks=_chunk(1, 5, PROMPT[5:]),
        )
    )
    tokens += _tokens(driver.decode((1, 6))) + _tokens(driver.decode((1, 7)))
    assert tokens == expected


def test_a_row_that_is_not_finite_fails_alone(executor: ModelExecutor) -> None:
    expected = _alone(executor, 4)
    driver = Driver(executor)
    tokens = _tokens(driver.prefill(0, PROMPT, pages=(1, 2, 3)))
    mixed = _tokens(driver.prefill(1, (4, POISON, 4), pages=(5, 6), decode=((0, 6),)))
    assert mixed[0] == NO_TOKEN
    # The row runs in one more step that was already in flight, and fails again.
    both = _tokens(driver.decode((0, 7), (1, 3)))
    assert both[1] == NO_TOKEN
    tokens += [mixed[1], both[0]]
    # Its pages, full of NaN, are granted to the healthy row for its next positions.
    grown = driver.launch(
        released_rows=_ints(1),
        broken_pages=_ints(5, 6),
        grants=Grants(rows=_ints(0), indices=_ints(2), pages=_ints(5)),
        decodes=_decodes((0, 8)),
    )
    tokens += _tokens(grown)
    assert tokens == expected


def test_pages_of_a_failed_row_serve_the_next_request(executor: ModelExecutor) -> None:
    expected = _alone(executor, 2)
    driver = Driver(executor)
    assert _tokens(driver.prefill(0, (POISON,) * 12, pages=(5, 6, 7))) == [NO_TOKEN]
    tokens = _tokens(driver.prefill(0, PROMPT, pages=(5, 6, 7), released=(0,), broken=(5, 6, 7)))
    tokens += _tokens(driver.decode((0, 6)))
    assert tokens == expected


def test_logprobs_come_with_the_tokens(executor: ModelExecutor) -> None:
    driver = Driver(executor)
    sampling = SamplingParams(temperature=0.0, num_logprobs=2)
    sampled = driver.prefill(2, PROMPT, pages=(1, 2), sampling=sampling).tokens()
    assert isinstance(sampled, SampledTokens)
    entry = sampled.logprobs[0]
    assert entry.rank == 1 and entry.logprob < 0
    assert entry.alternatives[0] == (int(sampled.token_ids[0]), entry.logprob)


def test_what_a_step_raises_is_raised_by_its_tokens(
    executor: ModelExecutor, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*inputs: object, **named: object) -> Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(model, "forward", fail)
    pending = Driver(executor).prefill(0, PROMPT, pages=(1, 2))
    with pytest.raises(RuntimeError, match="the device is gone"):
        pending.tokens()


def test_close_waits_and_may_be_repeated(executor: ModelExecutor) -> None:
    pending = Driver(executor).prefill(0, PROMPT, pages=(1, 2))
    executor.close()
    assert len(_tokens(pending)) == 1
    executor.close()


def test_chunks_of_dummy_steps_lie_within_a_section(executor: ModelExecutor) -> None:
    stages, lengths = executor.stages, []
    stages.limits = replace(stages.limits, section=24, most_guesses=0)

    def layers(batch: FlatBatch) -> LayersOutput:
        lengths.append(np.diff(batch.chunk_offsets).tolist())
        return stages.forward.over_batch(batch)

    executor.device.submit(WarmUp(stages, layers).all_kinds).result()

    assert lengths[:4] == [[24, 8], [24], [1], []]


def test_dummy_steps_have_chunks_beside_each_power_of_two_of_decoding_rows(
    executor: ModelExecutor,
) -> None:
    stages, num_decodes = executor.stages, []
    stages.limits = replace(stages.limits, max_rows=9)

    def layers(batch: FlatBatch) -> LayersOutput:
        if len(batch.chunk_rows):
            num_decodes.append(batch.num_decodes)
        return stages.forward.over_batch(batch)

    executor.device.submit(WarmUp(stages, layers).all_kinds).result()

    assert set(num_decodes) >= {1, 2, 4, 8}


def test_the_largest_dummy_step_has_as_many_guesses_as_there_may_be(
    executor: ModelExecutor,
) -> None:
    stages, num_samples = executor.stages, []
    stages.limits = replace(stages.limits, section=5, most_guesses=6)

    def layers(batch: FlatBatch) -> LayersOutput:
        of_chunks = batch.sample_indices[batch.sample_indices >= batch.num_decodes]
        counts = np.histogram(of_chunks, batch.chunk_offsets)[0]
        num_samples.append(sorted(counts.tolist(), reverse=True))
        return stages.forward.over_batch(batch)

    executor.device.submit(WarmUp(stages, layers).largest).result()

    assert num_samples == [[5, 3, 1, 1]]


def test_the_largest_dummy_step_has_no_more_rows_than_there_are(executor: ModelExecutor) -> None:
    """Even if guesses are to be checked, and each chunk has room for only one."""
    stages, num_rows = executor.stages, []
    stages.limits = replace(stages.limits, section=2, most_guesses=7)

    def layers(batch: FlatBatch) -> LayersOutput:
        num_rows.append(batch.num_decodes + len(batch.chunk_rows))
        return stages.forward.over_batch(batch)

    executor.device.submit(WarmUp(stages, layers).largest).result()

    assert num_rows == [stages.limits.max_rows]


def test_dummy_steps_expand_latents_before_a_chunk(
    executor: ModelExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest step, a chunk leaves room for as many positions as are expanded at a time."""

    class Expansion:
        most_positions = 12

        def plan_chunks(self, chunks: Chunks) -> None:
            assert chunks.host_ends is not None and chunks.host_offsets is not None
            starts.append((chunks.host_ends - np.diff(chunks.host_offsets)).tolist())

    starts: list[list[int]] = []
    stages = executor.stages
    stages.attention = replace(stages.attention, expansion=Expansion())
    monkeypatch.setattr(stages.forward, "_attention", stages.attention)
    warm_up = WarmUp(stages, stages.forward.over_batch)
    executor.device.submit(warm_up.largest).result()
    assert [of_step[0] for of_step in starts] == [0, 12]
