"""Structured outputs on a GPU: a step with masks is two graphs, any other is one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
import torch

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.execution.decode_graphs import DecodeGraphs
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.request import Grammar, GrammarKind, IntArray, SamplingParams
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_bench.engines import Collector
from tests.gpu.test_executor import retracting as retracting
from tests.gpu.test_executor import serve, tokens_of

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"enum": ["small", "large"]},
        "sold": {"type": "boolean"},
    },
    "required": ["name", "size", "sold"],
    "additionalProperties": False,
}
NUMBERS: Final = r"([0-9]{3},)+"


def prompts(count: int) -> list[IntArray]:
    rng = np.random.default_rng(8)
    return [rng.integers(10, 1900, 40).astype(np.int32) for _ in range(count)]


def grammar(kind: str, source: Any) -> Grammar:
    text = source if isinstance(source, str) else json.dumps(source)
    return Grammar(GrammarKind(kind), text)


def text_of(sink: Collector) -> str:
    stream = TextStream(load_vocabulary(DEMO_MODEL))
    return stream.push(sink.tokens, final=True).text


def check_numbers(sinks: Sequence[Collector], count: int) -> None:
    for sink in sinks:
        assert len(sink.tokens) == count
        assert re.fullmatch(r"([0-9]{3},)*[0-9]{0,3}", text_of(sink))


def mixed(count: int, **common: Any) -> list[SamplingParams]:
    """Answers of one length: every fourth is free, and the others are lists of numbers."""
    numbers = grammar("regex", NUMBERS)
    return [
        SamplingParams(
            max_tokens=40,
            temperature=index % 2,
            seed=index,
            ignore_eos=True,
            grammar=None if index % 4 == 3 else numbers,
            **common,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("count", [1, 8, 13])
@pytest.mark.parametrize("common", [{}, {"top_k": 30}, {"repetition_penalty": 1.2}])
def test_the_same_tokens_by_every_way(count: int, common: dict[str, Any]) -> None:
    """The same kernels over the same batch sizes, in graphs or not, with overlap or without."""
    options: dict[str, Any] = {"max_prefill_tokens": 1024, "dtype": "float32"}
    sampling = mixed(count, **common)
    results = [
        serve(DEMO_MODEL, prompts(count), sampling, **options, **more)
        for more in (
            {"cuda_graph_batch_sizes": f"{count}"},
            {"cuda_graph_batch_sizes": f"{count}", "overlap": False},
            {"cuda_graph_max_batch_size": 0},
        )
    ]
    check_numbers([sink for index, sink in enumerate(results[0]) if index % 4 != 3], 40)
    assert tokens_of(results[0]) == tokens_of(results[1]) == tokens_of(results[2])


def test_masks_do_not_touch_other_rows() -> None:
    """In fp32 and batches of one size, free rows say what they would say without masked rows."""
    count = 8
    options: dict[str, Any] = {"max_prefill_tokens": 1024, "dtype": "float32"}
    sampling = mixed(count)
    free = [
        SamplingParams(max_tokens=40, temperature=index % 2, seed=index, ignore_eos=True)
        for index in range(count)
    ]
    beside = serve(DEMO_MODEL, prompts(count), sampling, **options)
    alone = serve(DEMO_MODEL, prompts(count), free, **options)
    assert tokens_of(beside[3::4]) == tokens_of(alone[3::4])


def test_two_graphs_for_steps_with_masks_and_one_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: Counter[str] = Counter()

    def watched(name: str) -> None:
        inner = getattr(DecodeGraphs, name)

        def counted(self: DecodeGraphs, *inputs: Any, **options: Any) -> Any:
            replayed[name] += 1
            return inner(self, *inputs, **options)

        monkeypatch.setattr(DecodeGraphs, name, counted)

    watched("replay")
    watched("begin")
    plain = SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True)
    serve(DEMO_MODEL, prompts(3), plain)
    assert replayed["begin"] == 0 and replayed["replay"] >= 59
    replayed.clear()
    short = SamplingParams(max_tokens=60, grammar=grammar("regex", r"[0-9]{20}"))
    sinks = serve(DEMO_MODEL, prompts(3), [plain, short, plain])
    assert re.fullmatch(r"[0-9]{20}", text_of(sinks[1]))
    steps = len(sinks[1].tokens)
    assert steps - 2 <= replayed["begin"] <= steps + 1
    assert replayed["replay"] >= 60 - steps - 3
    replayed.clear()
    whole = SamplingParams(max_tokens=20, ignore_eos=True, grammar=grammar("regex", NUMBERS))
    check_numbers(serve(DEMO_MODEL, prompts(3), whole), 20)
    assert replayed["replay"] <= 1  # the step in flight when all have ended
    replayed.clear()
    serve(DEMO_MODEL, prompts(3), plain, structured_outputs=False)
    assert replayed["begin"] == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_valid(dtype: str) -> None:
    """Tokens are random, while prompts arrive in chunks and rows end at different times."""
    count = 60
    asked = [
        grammar("json_schema", SCHEMA),
        grammar("choice", ["yes", "no", "maybe so"]),
        grammar("regex", r"[A-Z]{2}-[0-9]{4}"),
        None,
    ]
    sampling = [
        SamplingParams(
            max_tokens=200,
            temperature=1.0,
            seed=index,
            num_logprobs=2 if index % 5 == 0 else None,
            grammar=asked[index % 4],
        )
        for index in range(count)
    ]
    sinks = serve(DEMO_MODEL, prompts(count), sampling, dtype=dtype, load_format="dummy")
    num_whole = 0
    for index, sink in enumerate(sinks):
        if index % 4 == 3 or len(sink.tokens) == 200:
            continue
        num_whole += 1
        text = text_of(sink)
        if index % 4 == 0:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif index % 4 == 1:
            assert text in ("yes", "no", "maybe so")
        else:
            assert re.fullmatch(r"[A-Z]{2}-[0-9]{4}", text)
        assert len(sink.logprobs) == len(sink.tokens)
        assert (sink.logprobs[0] is not None) == (index % 5 == 0)
    assert num_whole > 30


@pytest.mark.usefixtures("retracting")
def test_retracted_answers_go_on_where_they_were() -> None:
    sampling = SamplingParams(
        max_tokens=60, temperature=1.0, ignore_eos=True, grammar=grammar("regex", NUMBERS)
    )
    check_numbers(serve(DEMO_MODEL, prompts(8), sampling, num_pages=24), 60)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [None, 0])
@pytest.mark.parametrize("comm", ["nccl", "pynccl"])
@pytest.mark.parametrize("guesses", [0, 5])
def test_ranks_take_the_tokens_that_rank_0_was_allowed(
    comm: str, graphs: int | None, guesses: int
) -> None:
    sinks = serve(
        DEMO_MODEL,
        prompts(12),
        mixed(12),
        tensor_parallel_size=2,
        comm=comm,
        cuda_graph_max_batch_size=graphs,
        speculative_tokens=guesses,
        speculative_max_requests=12 if guesses else 8,
    )
    check_numbers([sink for index, sink in enumerate(sinks) if index % 4 != 3], 40)
    assert {len(sink.tokens) for sink in sinks} == {40}
