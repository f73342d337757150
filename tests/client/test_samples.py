"""Several samples of an answer, by all four ways to ask."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl_backend.server.process import TritonServer
from tests.client.ways import Way, all_ways

pytestmark = pytest.mark.server

HOT: dict[str, Any] = {
    "prompt": "Tell me a story about a fox.",
    "temperature": 1.8,
    "max_tokens": 12,
    "ignore_eos": True,
    "seed": 21,
}


@all_ways
def test_samples_of_an_answer(server: TritonServer, way: Way) -> None:
    own = [
        way.generate(server, **{**HOT, "seed": HOT["seed"] + sample, "num_logprobs": 1})
        for sample in range(3)
    ]
    whole = way.generate(server, **HOT, n=3, num_logprobs=1)
    deltas, streamed = way.stream(server, **HOT, n=3, num_logprobs=1)
    assert len({result.text for result in own}) > 1
    assert own[0].samples == (own[0],)
    for result in (whole, streamed):
        assert [sample.text for sample in result.samples] == [each.text for each in own]
        assert result.text == own[0].text
        for sample, each in zip(result.samples, own, strict=True):
            assert sample.num_output_tokens == len(sample.logprobs) == 12
            assert sample.num_input_tokens == each.num_input_tokens
            assert sample.finish_reason == "length" and sample.stop_reason is None
            assert [one.chosen.token_id for one in sample.logprobs] == [
                one.chosen.token_id for one in each.logprobs
            ]
    for index, each in enumerate(own):
        own_deltas = [delta for delta in deltas if delta.sample == index]
        assert "".join(delta.text for delta in own_deltas) == each.text
        reasons = [delta.finish_reason for delta in own_deltas]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]


@all_ways
def test_the_best_samples(server: TritonServer, way: Way) -> None:
    asked = {**HOT, "return_cumulative_logprob": True}
    every = way.generate(server, **asked, n=5)
    best = way.generate(server, **asked, n=2, best_of=5)
    ranked = sorted(every.samples, key=lambda one: -(one.cumulative_logprob or 0))
    assert [one.text for one in best.samples] == [one.text for one in ranked[:2]]


@all_ways
def test_a_stream_of_samples_that_is_left_early(server: TritonServer, way: Way) -> None:
    deltas, result = way.stream(server, leave_after=2, **{**HOT, "max_tokens": 3000}, n=3)
    assert len(deltas) == 2
    assert sum(len(sample.text) for sample in result.samples) == sum(len(d.text) for d in deltas)
    assert {sample.finish_reason for sample in result.samples} == {None}
