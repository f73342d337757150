"""Plans cross to other ranks as flat buffers and arrive unchanged."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.plan import (
    MTP_GUESS,
    TO_SAMPLE,
    Admission,
    Checks,
    Decodes,
    Draws,
    HostCopies,
    PromptChunks,
    SampledTokens,
    StepPlan,
    decode_plan,
    encode_plan,
)
from minisgl_backend.request import EMPTY, IntArray, RequestId, SamplingParams, TokenLogprobs

INT32 = st.integers(-(2**31), 2**31 - 1)
SIZE = st.integers(0, 2**31 - 1)


def arrays(size: int) -> st.SearchStrategy[IntArray]:
    return st.lists(INT32, min_size=size, max_size=size).map(
        lambda values: np.array(values, dtype=np.int32)
    )


ADMISSION = st.builds(
    Admission,
    request_id=st.integers(0, 2**63 - 1).map(RequestId),
    row=SIZE,
    num_prompt_tokens=SIZE,
    num_cached_tokens=SIZE,
    sampling=st.builds(SamplingParams, seed=st.integers(0, 2**64 - 1)),
    history=st.integers(0, 4).flatmap(arrays),
)


EMPTY_PLAN = StepPlan(step=0)
ARRAY = st.integers(0, 4).flatmap(arrays)


def plans() -> st.SearchStrategy[StepPlan]:
    """Plans of rank 0, with arrays of any lengths."""
    parts: dict[str, st.SearchStrategy[Any]] = {}
    for part in fields(StepPlan):
        if part.name == "draws":  # rank 0 has the admissions
            continue
        default = getattr(StepPlan(step=0), part.name)
        if is_dataclass(default):
            own = {array.name: ARRAY for array in fields(default)}
            parts[part.name] = st.builds(type(default), **own)
        elif isinstance(default, np.ndarray):
            parts[part.name] = ARRAY
    return st.builds(
        StepPlan,
        step=st.integers(0, 2**63 - 1),
        admissions=st.lists(ADMISSION, max_size=2).map(tuple),
        **parts,
    )


def assert_same(a: object, b: object) -> None:
    """All fields are equal; arrays also have equal types."""
    if is_dataclass(a) and not isinstance(a, type):
        assert type(a) is type(b)
        for spec in fields(a):
            assert_same(getattr(a, spec.name), getattr(b, spec.name))
    elif isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        assert a.dtype == b.dtype == np.int32
        assert np.array_equal(a, b)
    else:
        assert a == b
        assert type(a) is type(b)


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(0, 5))
def test_decoding_undoes_encoding_but_for_what_says_how_to_sample(
    plan: StepPlan, num_spare_words: int
) -> None:
    """Other ranks need not know all about sampling."""
    buffer, draws = encode_plan(plan), Draws.of(plan.admissions)
    expected = replace(plan, admissions=(), masked_rows=EMPTY, draws=draws)
    assert buffer.dtype == np.int32
    assert_same(decode_plan(buffer), expected)
    assert_same(decode_plan(np.pad(buffer, (0, num_spare_words))), expected)


def test_copies_to_and_from_main_memory_take_no_words_if_there_are_none() -> None:
    values = [getattr(EMPTY_PLAN, part.name) for part in fields(StepPlan)]
    num_arrays = sum(isinstance(value, np.ndarray) for value in values)
    num_arrays -= 1  # masked_rows, which only rank 0 needs
    num_arrays += sum(
        len(fields(value))
        for value in values
        if is_dataclass(value) and not isinstance(value, HostCopies)
    )
    assert len(encode_plan(EMPTY_PLAN)) == 2 * (1 + num_arrays)
    one = np.array([5], np.int32)
    for name in ("host_saves", "host_loads"):
        for copies in (
            HostCopies(one, one),
            HostCopies(window_pages=one, window_slots=one),
            HostCopies(snapshots=one, state_slots=one),
        ):
            parts: dict[str, Any] = {name: copies}
            plan = StepPlan(step=2**63 - 1, **parts)
            words = encode_plan(plan)
            assert len(words) == 2 * (1 + num_arrays + 12) + 2
            assert_same(decode_plan(words), plan)


def test_a_sampled_row_is_a_last_chunk_or_decodes() -> None:
    plan = StepPlan(
        step=0,
        chunks=PromptChunks(
            rows=np.array([4, 2, 3], dtype=np.int32),
            starts=np.array([0, 8, 0], dtype=np.int32),
            lengths=np.array([2, 1, 3], dtype=np.int32),
            next_tokens=np.array([TO_SAMPLE, 7, TO_SAMPLE], dtype=np.int32),
            tokens=np.arange(6, dtype=np.int32),
        ),
        decodes=Decodes(
            rows=np.array([7, 5], dtype=np.int32), positions=np.array([9, 9], dtype=np.int32)
        ),
    )
    assert plan.sample_rows.tolist() == [4, 3, 7, 5]
    assert plan.sample_positions.tolist() == [2, 3, 10, 10]
    assert plan.num_tokens == 8


def test_a_row_with_guesses_is_sampled_after_each_token() -> None:
    plan = StepPlan(
        step=0,
        checks=Checks(
            rows=np.array([4, 6], dtype=np.int32),
            starts=np.array([20, 3], dtype=np.int32),
            lengths=np.array([3, 2], dtype=np.int32),
            tokens=np.arange(10, 15, dtype=np.int32),
        ),
        chunks=PromptChunks(
            rows=np.array([2, 3], dtype=np.int32),
            starts=np.array([8, 0], dtype=np.int32),
            lengths=np.array([2, 4], dtype=np.int32),
            next_tokens=np.array([7, TO_SAMPLE], dtype=np.int32),
            tokens=np.arange(6, dtype=np.int32),
        ),
        decodes=Decodes(rows=np.array([7], np.int32), positions=np.array([9], np.int32)),
    )
    assert plan.checks.token_rows.tolist() == [4, 4, 4, 6, 6]
    assert plan.checks.positions.tolist() == [20, 21, 22, 3, 4]
    guesses = {row: of_row.tolist() for row, of_row in plan.checks.guesses().items()}
    assert guesses == {4: [11, 12], 6: [14]}
    assert plan.sample_rows.tolist() == [4, 4, 4, 6, 6, 3, 7]
    assert plan.sample_positions.tolist() == [21, 22, 23, 4, 5, 4, 10]
    assert plan.num_tokens == 12


def test_guesses_for_masked_rows_are_told() -> None:
    plan = StepPlan(
        step=0,
        decodes=Decodes(rows=np.array([7, 2, 5], np.int32), positions=np.array([9] * 3, np.int32)),
        mtp_rows=np.array([7, 2], np.int32),
        masked_rows=np.array([2, 5], np.int32),
    )
    assert plan.reported_rows.tolist() == [2]
    assert not len(replace(plan, mtp_rows=EMPTY).reported_rows)
    assert not len(decode_plan(encode_plan(plan)).reported_rows), "other ranks need not know"


def test_what_stands_for_guesses_crosses_to_other_ranks() -> None:
    tokens = np.array([30, MTP_GUESS, MTP_GUESS - 1], np.int32)
    row, start, length = (np.array([value], np.int32) for value in (4, 20, 3))
    plan = decode_plan(encode_plan(StepPlan(step=0, checks=Checks(row, start, length, tokens))))
    assert plan.checks.guesses()[4].tolist() == [-2, -3]


def test_some_samples_keep_what_came_with_them() -> None:
    logprobs = {index: TokenLogprobs(-float(index), 1) for index in (0, 2, 3)}
    embeddings = {1: np.ones(2, np.float32), 3: np.zeros(2, np.float32)}
    tokens = SampledTokens(np.arange(10, 14, dtype=np.int32), logprobs, embeddings=embeddings)
    found = tokens.at(np.array([3, 1], np.int32))
    assert found.token_ids.tolist() == [13, 11]
    assert found.logprobs == {0: logprobs[3]}
    assert found.embeddings == {0: embeddings[3], 1: embeddings[1]}
