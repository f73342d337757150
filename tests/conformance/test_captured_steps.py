"""Captured steps give the tokens of launched ones: the executor's path for GPUs, run on a CPU.

A stand-in for a GPU records work as a function and replays it by calling it again, into the tensors
that the first call returned. So the tests see which row is computed, what padding does, and what
the host writes between two replays; they see all but what a capture would freeze. The kernels'
twins do the computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from minisgl_backend.attention import choose
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution.sampling import StepLogits, StepOutput
from minisgl_backend.models.decoder import LayersOutput
from minisgl_backend.parallel.group import Group
from minisgl_backend.plan import Pending, StepPlan, decode_plan, encode_plan
from minisgl_backend.request import IntArray, SamplingParams
from minisgl_bench.decode import graph_facts
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.eagle_checkpoints import PREDICTABLE, write_eagle_checkpoint
from tests.conformance.engines import (
    TinyEngine,
    load_model,
    prompts_with_shared_prefixes,
)
from tests.conformance.mtp_checkpoints import write_mtp_checkpoint
from tests.conformance.test_guesses import PENALTIES, assert_some_right, undecided
from tests.parallel.threads import on_ranks

T = TypeVar("T")

NUM_REQUESTS = 24  # more than there are rows and pages for, so that these are used twice
GRAPHS: dict[str, Any] = {"graph_sizes": (1, 2, 4, 8, 16), "chunk_graph_sizes": (16, 32, 48)}
GREEDY = SamplingParams(temperature=0.0)
ADJUSTED = SamplingParams(
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    logit_bias=((17, 2.0),),
    num_logprobs=2,
)
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=5)
RANDOM = SamplingParams(temperature=0.8, seed=6)


class Recorded(Generic[T]):
    """``Graph``: each replay fills ``output`` anew."""

    def __init__(self, work: Callable[[], T], replays: list[str]) -> None:
        self._work = work
        self._replays = replays
        self.output = work()

    def replay(self) -> None:
        found = self._work()
        self._replays.append(type(found).__name__)
        for old, new in zip(_tensors(self.output), _tensors(found), strict=True):
            old.copy_(new)


class RecordingDevice(CpuDevice):
    """To an executor this device is not the host; ``replays`` names the outputs of replays, and
    ``num_overwritten`` counts what is written between them."""

    is_host: Any = False

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.replays: list[str] = []
        self.num_captures = 0
        self.num_overwritten = 0

    def capture(self, work: Callable[[], T]) -> Recorded[T]:
        self.num_captures += 1
        return Recorded(work, self.replays)

    def overwrite(self, tensor: Tensor, array: npt.NDArray[Any]) -> None:
        self.num_overwritten += 1
        super().overwrite(tensor, array)

    def download(self, tensor: Tensor) -> Tensor:
        """A copy, since the next replay overwrites what a step leaves."""
        return tensor.clone()


def _tensors(output: object) -> list[Tensor]:
    if isinstance(output, StepOutput):
        return [output.tokens, output.logits]
    if isinstance(output, StepLogits):
        follow: Any = output.follow
        of_mtp = []
        if follow is not None:
            step, read = follow.args
            of_mtp = [step.positions, step.slots, read]
        return [output.logits, *output.samples, *of_mtp]
    if isinstance(output, LayersOutput):
        return [output.residual, output.for_mtp]
    assert isinstance(output, Tensor)
    return [output]


@pytest.mark.parametrize(
    ("case", "overlap"),
    [
        ("granite-tied", True),
        ("llama-biases", True),
        ("mistral-window", False),
        ("qwen3", True),
        ("qwen3-moe", True),
        ("qwen3.5", True),
        ("qwen3.5-experts", False),
        ("nemotron-h", True),
        ("granite-hybrid-dense", False),
        ("lfm2", True),
        ("olmo-hybrid", False),
        ("kimi-linear", True),
        ("cohere2", True),
        ("llama4", True),
        ("deepseek-v32", True),
        ("glm-moe-dsa-shared", False),
        ("hy-v4", True),
    ],
)
def test_tokens_equal_those_of_launched_steps(
    case: str, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy requests, adjusted ones that ask for log-probabilities, and seeded draws."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    model = load_model(tmp_path, context=CONTEXT, fused=True)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=NUM_REQUESTS
    )
    # requests end one after another, so that batches of all sizes decode
    sampling = [
        replace(params, max_tokens=4 + index)
        for index, params in zip(range(NUM_REQUESTS), cycle([GREEDY, ADJUSTED, DRAWN]))
    ]
    outcomes, replays = [], []
    for graphs in ({}, GRAPHS):
        device = RecordingDevice()
        with TinyEngine(
            model,
            page_size=16,
            num_positions=1024,
            context=CONTEXT,
            overlap=overlap,
            attention="triton",
            device=device,
            **graphs,
        ) as engine:
            device.replays.clear()
            outcomes.append(engine.run(prompts, sampling))
        replays.append(device.replays)
    launched, replayed = outcomes
    assert [len(tokens) for tokens in launched.tokens] == [4 + i for i in range(NUM_REQUESTS)]
    assert replayed.tokens == launched.tokens
    for one, other in zip(replayed.logprobs, launched.logprobs, strict=True):
        np.testing.assert_allclose(
            [entry.logprob for entry in one], [entry.logprob for entry in other], atol=1e-3
        )
    assert not replays[0]
    assert {"StepOutput", "LayersOutput"} == set(replays[1])  # decode steps, and layers of others


@pytest.mark.parametrize("case", ["qwen3", "qwen3.5"])
def test_between_steps_of_the_same_rows_nothing_is_written_but_grants(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    model, device = load_model(tmp_path, context=CONTEXT, fused=True), RecordingDevice()
    options: dict[str, Any] = {"page_size": 16, "attention": "triton", "device": device, **GRAPHS}
    with TinyEngine(model, context=CONTEXT, **options) as engine:
        engine.run([np.arange(20, dtype=np.int32)], [GREEDY])  # graphs have other rows before
        device.num_overwritten = 0
        found = engine.run([np.arange(5, dtype=np.int32)], [replace(GREEDY, max_tokens=40)])
    assert found.num_steps >= 40
    of_prompt = 1 if case == "qwen3" else 2  # and its blocks
    assert device.num_overwritten <= of_prompt + 1 + 45 // 16


@pytest.mark.parametrize("case", ["qwen3.5", "nemotron-h", "falcon-h1", "lfm2", "kimi-linear"])
def test_guesses_beside_recurrent_states_are_checked_by_graphs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside prompts, as there are more requests than rows. The states that rows keep while
    they decode serve those who go on from their answers."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    model, device = load_model(tmp_path, context=CONTEXT, fused=True), RecordingDevice()
    few = tuple((token, 100.0) for token in (10, 11, 12))
    prompts = [np.array([10, 11, 12, 12] * count, np.int32) for count in range(1, 13)]
    sampling = [replace(GREEDY, max_tokens=30, logit_bias=few)] * len(prompts)
    options: dict[str, Any] = {"context": CONTEXT, "page_size": 16, "attention": "triton"}
    options |= {"num_positions": 2048, "num_snapshots": 64}

    def next_turns(answers: Sequence[Sequence[int]]) -> list[IntArray]:
        turns = zip(prompts, answers, strict=True)
        return [np.array([*prompt, *answer, 10], np.int32) for prompt, answer in turns]

    with TinyEngine(model, **options) as engine:
        plain = engine.run(prompts, sampling).tokens
        plain_then = engine.run(next_turns(plain), sampling).tokens
    graphs: dict[str, Any] = {"graph_sizes": (1, 8, 64), "chunk_graph_sizes": (16, 64, 256, 512)}
    with TinyEngine(model, **options, **graphs, device=device, speculative_tokens=5) as engine:
        device.replays.clear()
        found = engine.run(prompts, sampling)
        assert_some_right(engine)
        assert len(device.replays) == found.num_steps, "all steps are replayed"
        then = engine.run(next_turns(found.tokens), sampling)
        assert then.num_cached_tokens > sum(map(len, prompts)), "answers, too"
    assert found.tokens == plain
    assert then.tokens == plain_then
    assert {"StepOutput", "LayersOutput"} == set(device.replays)


@pytest.mark.parametrize("case", ["qwen3.5", "glm4-moe", "deepseek-v3", "deepseek-v32"])
def test_an_mtp_layer_is_part_of_graphs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in steps with prompts, as there are more requests than rows."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_mtp_checkpoint(case, tmp_path, predictable=True)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=NUM_REQUESTS
    )
    sampling = [replace(GREEDY, max_tokens=4 + index) for index in range(NUM_REQUESTS)]
    options: dict[str, Any] = {"context": CONTEXT, "page_size": 16, "attention": "triton"}
    with TinyEngine(load_model(tmp_path, context=CONTEXT, fused=True), **options) as engine:
        plain = engine.run(prompts, sampling).tokens
    model, device = load_model(tmp_path, context=CONTEXT, fused=True, mtp=True), RecordingDevice()
    graphs: dict[str, Any] = {"graph_sizes": (1, 8, 64), "chunk_graph_sizes": (16, 64, 128)}
    with TinyEngine(model, **options, **graphs, device=device, mtp_tokens=3) as engine:
        device.replays.clear()
        found = engine.run(prompts, sampling)
        num_guesses, num_right = engine.num_guesses
    assert found.tokens == plain
    assert num_right > num_guesses / 2
    # each step, and the guesses of nearly each
    assert found.num_steps < len(device.replays) <= 2 * found.num_steps
    assert {"StepOutput", "LayersOutput", "Tensor"} == set(device.replays)


@pytest.mark.parametrize("case", ["qwen3", "gpt-oss"])
def test_an_eagle_layer_is_part_of_graphs(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an MTP layer; what it reads comes out of the captured layers."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_eagle_checkpoint(case, tmp_path, PREDICTABLE, predictable=True)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=NUM_REQUESTS
    )
    sampling = [replace(GREEDY, max_tokens=4 + index) for index in range(NUM_REQUESTS)]
    options: dict[str, Any] = {"context": CONTEXT, "page_size": 16, "attention": "triton"}
    folder = tmp_path / "model"
    with TinyEngine(load_model(folder, context=CONTEXT, fused=True), **options) as engine:
        plain = engine.run(prompts, sampling).tokens
    model = load_model(folder, context=CONTEXT, fused=True, eagle=tmp_path / "eagle")
    graphs: dict[str, Any] = {"graph_sizes": (1, 8, 64), "chunk_graph_sizes": (16, 64, 128)}
    for masks in (False, True):
        device = RecordingDevice()
        with TinyEngine(
            model, **options, **graphs, takes_masks=masks, device=device, mtp_tokens=3
        ) as engine:
            device.replays.clear()
            found = engine.run(prompts, sampling)
            num_guesses, num_right = engine.num_guesses
        assert found.tokens == plain
        assert num_right > num_guesses / 5
        assert {"StepOutput", "LayersOutput", "Tensor"} == set(device.replays)


def test_guesses_of_rows_with_penalties_are_checked_by_decode_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are told the guesses, and penalize what is sampled after them."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint("qwen3", tmp_path)
    model = load_model(tmp_path, context=CONTEXT, fused=True)
    prompts, without = undecided()
    sampling = [replace(each, **some) for each, some in zip(without, cycle(PENALTIES))]
    with TinyEngine(model, context=CONTEXT, page_size=16, attention="triton") as engine:
        plain = engine.run(prompts, sampling).tokens
    device = RecordingDevice()
    with TinyEngine(
        model,
        context=CONTEXT,
        page_size=16,
        attention="triton",
        device=device,
        graph_sizes=(1, 8, 48),
        speculative_tokens=5,
    ) as engine:
        device.replays.clear()
        found = engine.run(prompts, sampling)
        assert_some_right(engine)
    assert found.tokens == plain
    # all steps but those of prompts
    assert found.num_steps - len(prompts) < len(device.replays) < found.num_steps


@pytest.mark.parametrize("case", ["llama-biases", "qwen3-moe"])
def test_two_ranks_give_the_same_tokens_captured_and_launched(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps need the logits of both ranks, others do not."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=NUM_REQUESTS
    )
    kinds = [*[ADJUSTED, DRAWN] * 4, *[GREEDY, RANDOM] * (NUM_REQUESTS // 2 - 4)]
    sampling = [replace(params, max_tokens=4 + index) for index, params in enumerate(kinds)]

    def tokens_of(group: Group, graphs: dict[str, Any]) -> tuple[list[list[int]], set[bool]]:
        model = load_model(tmp_path, context=CONTEXT, fused=True, group=group)
        with TinyEngine(
            model,
            page_size=16,
            num_positions=1024,
            context=CONTEXT,
            attention="triton",
            device=RecordingDevice(),
            **graphs,
        ) as engine:
            needs = set()
            launch, sampler = engine.executor.launch, engine.executor.stages.sampler

            def follow(plan: StepPlan) -> Pending:
                """A follower gets the encoded plan."""
                pending = launch(decode_plan(encode_plan(plan)) if group.rank else plan)
                needs.add(sampler.need_all_logits(plan.sample_rows))
                return pending

            engine.executor.launch = follow  # type: ignore[method-assign]
            return engine.run(prompts, sampling).tokens, needs

    found = [
        *on_ranks(2, lambda group: tokens_of(group, {})),
        *on_ranks(2, lambda group: tokens_of(group, GRAPHS)),
    ]
    assert [len(tokens) for tokens in found[0][0]] == [4 + i for i in range(NUM_REQUESTS)]
    for tokens, needs in found:
        assert tokens == found[0][0]
        assert needs == {False, True}


def test_two_ranks_guess_by_an_eagle_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their steps are captured in two parts, of which the second has the layer."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_eagle_checkpoint("qwen3", tmp_path, PREDICTABLE, predictable=True)
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=7, count=12)
    sampling = [replace(GREEDY, max_tokens=20 + index) for index in range(12)]
    options: dict[str, Any] = {"page_size": 16, "context": CONTEXT, "attention": "triton"}
    folder = tmp_path / "model"
    with TinyEngine(load_model(folder, context=CONTEXT, fused=True), **options) as engine:
        plain = engine.run(prompts, sampling).tokens

    def tokens_of(group: Group, graphs: dict[str, Any]) -> tuple[list[list[int]], float]:
        model = load_model(
            folder, context=CONTEXT, fused=True, eagle=tmp_path / "eagle", group=group
        )
        device = RecordingDevice()
        with TinyEngine(model, **options, **graphs, device=device, mtp_tokens=3) as engine:
            found = engine.run(prompts, sampling).tokens
            num_guesses, num_right = engine.num_guesses
            return found, num_right / num_guesses

    for graphs in ({}, {**GRAPHS, "graph_sizes": (1, 8, 64)}):
        for found, share in on_ranks(2, partial(tokens_of, graphs=graphs)):
            assert found == plain and share > 0.2


def captured_of_rank(folder: Path, group: Group, device: RecordingDevice) -> TinyEngine:
    """A rank whose steps are captured, those that wait for masks, too."""
    return TinyEngine(
        load_model(folder, context=CONTEXT, fused=True, group=group),
        page_size=16,
        num_positions=1024,
        context=CONTEXT,
        attention="triton",
        device=device,
        takes_masks=True,
        **GRAPHS,
    )


@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe"])
def test_ranks_capture_together(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including steps that wait for masks: a rank that captured different steps would wait for sums
    forever."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint(case, tmp_path)

    def replays_of(group: Group) -> list[str]:
        device = RecordingDevice()
        with captured_of_rank(tmp_path, group, device):
            return device.replays

    first, second = on_ranks(2, replays_of)
    assert first == second and first


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_graphs_cost_is_told_of_all_of_them(
    num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that wait for masks, and those of several ranks, are captured in parts."""
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    write_checkpoint("qwen3", tmp_path)

    def facts_of(group: Group) -> tuple[dict[str, Any], int]:
        device = RecordingDevice()
        with captured_of_rank(tmp_path, group, device) as engine:
            return graph_facts(engine.executor), device.num_captures

    for facts, num_captures in on_ranks(num_ranks, facts_of):
        assert facts["decode_graphs"] + facts["chunk_graphs"] == num_captures
        assert facts["chunk_graphs"] == len(GRAPHS["chunk_graph_sizes"])
        assert facts["decode_graphs"] == 3 * len(GRAPHS["graph_sizes"])
