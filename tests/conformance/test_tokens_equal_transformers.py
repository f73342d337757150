"""Greedy tokens equal those of transformers, exactly, whatever the engine does underneath."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from minisgl_backend.attention import expanded
from minisgl_backend.attention.base import Attend, AttendExpanded
from minisgl_backend.attention.sparse import AttendChosen, SparseAttention
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import IntArray, SamplingParams
from tests.conformance.checkpoints import CASES, CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes

MAX_TOKENS = 20
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)


ALL_OPTIONS: Final = [
    {"page_size": page_size, "radix": radix, "overlap": overlap}
    for page_size, radix, overlap in product((1, 16, 64), (True, False), (True, False))
]
SOME_OPTIONS: Final = [
    {"page_size": 1, "radix": True, "overlap": True},
    {"page_size": 16, "radix": True, "overlap": True},
    {"page_size": 16, "radix": False, "overlap": False},
    {"page_size": 64, "radix": True, "overlap": False},
]
FULL: Final = ("llama", "mistral-window", "olmo3", "qwen3-moe", "qwen3-window")
"""Cases that run with all of ``SOME_OPTIONS``; the others differ from these only in the model, and
run without a cache only by night."""


def run(case: str, options: dict[str, Any], *, by_night: bool = False) -> Any:
    """One run of ``test_tokens_are_equal``."""
    name = f"{case}-{'-'.join(map(str, options.values()))}"
    return pytest.param(case, options, id=name, marks=[pytest.mark.nightly] if by_night else [])


def runs(case: str) -> list[Any]:
    if case == "qwen3":
        return [run(case, options) for options in ALL_OPTIONS]
    if case in FULL:
        return [run(case, options) for options in SOME_OPTIONS]
    return [run(case, SOME_OPTIONS[1]), run(case, SOME_OPTIONS[2], by_night=True)]


class Answers:
    """What transformers models answer, each to one prompt alone."""

    def __init__(self, models: Sequence[Any], prompts: Sequence[IntArray]) -> None:
        self._asked = list(zip(models, prompts, strict=True))
        self._tokens: list[list[int]] | None = None

    def tokens(self, guesses: Sequence[Sequence[int]]) -> list[list[int]]:
        """The tokens of each answer, whatever the guesses; right guesses save time (``generate``).

        Computed once: later guesses are ignored.
        """
        if self._tokens is None:
            asked = zip(self._asked, guesses, strict=True)
            self._tokens = [generate(model, prompt, guess) for (model, prompt), guess in asked]
        return self._tokens


@dataclass(frozen=True)
class Reference:
    """A model, 16 prompts, and what transformers answers to each alone."""

    model: Decoder
    prompts: list[IntArray]
    answers: Answers


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    case: str = request.param
    folder = tmp_path_factory.mktemp(case)
    theirs = write_checkpoint(case, folder)
    # transformers rotates a whole prompt by its length when ``dynamic`` stretches, so that the keys
    # of a prefix depend on what follows it: prompts stay within the unstretched context, outputs go
    # beyond it.
    longest = 60 if "dynamic" in case else 110
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=longest, seed=7)
    model = load_model(folder, context=CONTEXT)
    return Reference(model, prompts, Answers([theirs] * len(prompts), prompts))


@pytest.mark.parametrize(
    ("reference", "options"),
    [each for case in sorted(CASES) for each in runs(case)],
    indirect=["reference"],
)
def test_tokens_are_equal(reference: Reference, options: dict[str, Any]) -> None:
    with TinyEngine(reference.model, context=CONTEXT, **options) as engine:
        outcome = engine.run(reference.prompts, [GREEDY] * len(reference.prompts))
    assert outcome.tokens == reference.answers.tokens(outcome.tokens)
    if not options["radix"]:
        assert outcome.num_cached_tokens == 0
    elif options["page_size"] < 64:
        assert outcome.num_cached_tokens > 0


@pytest.mark.parametrize("reference", ["llama4", "mistral-window"], indirect=True)
@pytest.mark.parametrize(
    ("chunk", "page_size"),
    [
        (5, 1),
        (31, 8),
        (48, 1),
        (200, 8),
        *(
            pytest.param(chunk, page_size, marks=pytest.mark.nightly)
            for chunk, page_size in ((5, 8), (31, 1), (48, 8), (200, 1))
        ),
    ],
)
def test_windows_and_sections_are_cut_anywhere(
    reference: Reference, chunk: int, page_size: int
) -> None:
    """With a cold cache and a warm one."""
    with TinyEngine(
        reference.model, context=CONTEXT, page_size=page_size, chunk=chunk, num_positions=2048
    ) as engine:
        for _ in range(2):
            outcome = engine.run(reference.prompts, [GREEDY] * len(reference.prompts))
            assert outcome.tokens == reference.answers.tokens(outcome.tokens)


@pytest.mark.parametrize(
    "reference", ["deepseek-v32", "glm-moe-dsa-shared", "hy-v4"], indirect=True
)
def test_prompts_are_expanded_beside_rows_that_choose(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, planned = SparseAttention.plan, list[Attend]()

    def kept(*of_step: Any) -> Attend:
        planned.append(plan(*of_step))
        return planned[-1]

    monkeypatch.setattr(SparseAttention, "plan", kept)
    monkeypatch.setattr(expanded, "pays", lambda *_: True)
    with TinyEngine(reference.model, context=CONTEXT, page_size=4, chunk=5) as engine:
        outcome = engine.run(reference.prompts, [GREEDY] * len(reference.prompts))
    assert outcome.tokens == reference.answers.tokens(outcome.tokens)
    of_rows = [attend.rows for attend in planned if isinstance(attend, AttendExpanded)]
    assert any(isinstance(rows, AttendChosen) for rows in of_rows)


@pytest.mark.parametrize(
    ("page_size", "overlap"),
    [
        (4, True),
        (16, False),
        pytest.param(4, False, marks=pytest.mark.nightly),
        pytest.param(16, True, marks=pytest.mark.nightly),
    ],
)
def test_turns_go_on_from_answers(page_size: int, overlap: bool, tmp_path: Path) -> None:
    """Conversations run side by side. With recurrent layers, at least nine tenths as much is cached
    as with attention alone; tokens are those without a cache."""
    cached = {}
    for case in ("qwen3", "qwen3.5", "qwen3-next", "nemotron-h", "lfm2", "kimi-linear"):
        folder = tmp_path / case
        folder.mkdir()
        theirs = write_checkpoint(case, folder)
        model = load_model(folder, context=CONTEXT)
        with TinyEngine(
            model, context=CONTEXT, page_size=page_size, overlap=overlap, num_snapshots=24
        ) as engine:
            cached[case] = hold_conversations(engine, theirs)
    assert cached["qwen3"] > 0
    assert cached["qwen3.5"] >= 0.9 * cached["qwen3"]
    assert cached["qwen3-next"] >= 0.9 * cached["qwen3"]
    assert cached["nemotron-h"] >= 0.9 * cached["qwen3"]
    assert cached["lfm2"] >= 0.9 * cached["qwen3"]
    assert cached["kimi-linear"] >= 0.9 * cached["qwen3"]


def hold_conversations(engine: TinyEngine, theirs: Any) -> int:
    """How many prompt tokens were cached; all answers must be those of transformers."""
    rng, num_cached = np.random.default_rng(11), 0
    histories = [np.empty(0, np.int32) for _ in range(3)]
    for _ in range(4):
        said = [rng.integers(0, VOCAB_SIZE, int(rng.integers(5, 16))) for _ in histories]
        prompts = [
            np.concatenate(parts).astype(np.int32) for parts in zip(histories, said, strict=True)
        ]
        outcome = engine.run(prompts, [GREEDY] * len(prompts))
        assert outcome.tokens == Answers([theirs] * 3, prompts).tokens(outcome.tokens)
        num_cached += outcome.num_cached_tokens
        histories = [
            np.concatenate([prompt, np.array(answer, np.int32)])
            for prompt, answer in zip(prompts, outcome.tokens, strict=True)
        ]
    return num_cached


def generate(model: Any, prompt: IntArray, guess: Sequence[int] = ()) -> list[int]:
    """The tokens of transformers, which must be clear of ties.

    If ``guess`` is what it would generate, one pass over the prompt and the guess proves it: each
    of its tokens is the best one after those before it. Otherwise the tokens are generated, one
    pass each; so they are if that pass would rotate the prompt by the length of both.
    """
    ids = torch.from_numpy(prompt).long().unsqueeze(0)
    if len(guess) == MAX_TOKENS and not _rotates_by_length(model):
        whole = torch.cat([ids, torch.tensor([guess[:-1]], dtype=torch.long)], dim=1)
        with torch.inference_mode():
            logits = model(whole, attention_mask=torch.ones_like(whole)).logits
        logits = logits[0, len(prompt) - 1 :]
        if logits.argmax(dim=-1).tolist() == list(guess):
            _check_clear(logits)
            return list(guess)
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    _check_clear(torch.cat(generated.logits))
    tokens: list[int] = generated.sequences[0, len(prompt) :].tolist()
    return tokens


def _check_clear(logits: torch.Tensor) -> None:
    best, second = logits.topk(2, dim=-1).values.unbind(dim=-1)
    assert (best - second).min() > 1e-4, "a near tie: the checkpoint's seed does not serve the test"


def _rotates_by_length(model: Any) -> bool:
    rope = json.dumps(model.config.to_dict())
    return "dynamic" in rope or "longrope" in rope
