"""An MTP layer, or an EAGLE-3 layer in its place, on a GPU: tokens are those without it, and its
guesses those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.parts import STANDARD
from minisgl_backend.runtime.ports import Scheduler
from minisgl_backend.scheduling.scheduler import SchedulerConfig
from tests.conformance import eagle_checkpoints, mtp_checkpoints
from tests.conformance.checked_guesses import CheckedGuesses
from tests.conformance.checkpoints import VOCAB_SIZE
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.conformance.test_mtp_guesses import GREEDY, SAMPLED
from tests.gpu.test_guesses import WAYS, served

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

SAMPLING: Final = [GREEDY] * 5 + [SAMPLED]
CASES: Final = ("qwen3.5", "qwen3.5-experts", "glm4-moe", "deepseek-v3", "deepseek-v32")
EAGLE: Final = {
    "qwen3": "default",
    "llama": "named",
    "qwen3-moe": "speculators",
    "gpt-oss": "head-norms",
}
"""Cases with an EAGLE-3 layer, and its form unless it is predictable."""
ALL: Final = [*CASES, *(f"eagle {case}" for case in EAGLE)]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint with a layer: the model's folder, the options that name the layer, what it
    guesses after some tokens, and the least share of its guesses that are right."""

    model: Path
    options: dict[str, Any]
    reference: Callable[[list[int], int], list[int]]
    least_right: float = 0.5


def written(case: str, folder: Path, *, predictable: bool = False) -> Written:
    eagle = case.removeprefix("eagle ")
    if eagle == case:
        theirs = mtp_checkpoints.write_mtp_checkpoint(case, folder, predictable=predictable)
        return Written(
            folder,
            {},
            lambda tokens, count: mtp_checkpoints.reference_guesses(theirs, tokens, count),
        )
    form = eagle_checkpoints.PREDICTABLE if predictable else eagle_checkpoints.FORMS[EAGLE[eagle]]
    layer = eagle_checkpoints.write_eagle_checkpoint(eagle, folder, form, predictable=predictable)
    return Written(
        folder / "model",
        {"speculative_mtp_model": str(folder / "eagle")},
        lambda tokens, count: mtp_checkpoints.reference_guesses(layer, tokens, count),
        least_right=0.2,  # its output head lacks tokens
    )


@pytest.mark.parametrize("case", ALL)
def test_tokens_are_those_without_guesses(case: str, tmp_path: Path) -> None:
    """With each way to run steps, and beside guesses that are looked up."""
    found = written(case, tmp_path, predictable=True)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=len(SAMPLING)
    )
    plain, _ = served(found.model, prompts, SAMPLING)
    for changed in [*WAYS, {"speculative_tokens": 5}]:
        options: dict[str, Any] = {**found.options, **changed}
        tokens, stats = served(found.model, prompts, SAMPLING, speculative_mtp_tokens=3, **options)
        assert tokens == plain, changed
        assert stats.num_right_guesses > stats.num_guesses * found.least_right


@pytest.mark.parametrize("case", ALL)
def test_guesses_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    """But for near ties. A layer with random weights depends on all of its inputs."""
    theirs = written(case, tmp_path)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=len(SAMPLING)
    )
    planners: list[CheckedGuesses] = []

    def noted(cache: KVCache, config: SchedulerConfig) -> Scheduler:
        planners.append(CheckedGuesses(STANDARD.scheduler(cache, config)))
        return planners[-1]

    parts = replace(STANDARD, scheduler=noted)
    for changed in WAYS:
        options: dict[str, Any] = {"cache": "naive", "max_prefill_tokens": 48, **changed}
        options |= theirs.options
        served(theirs.model, prompts, SAMPLING, parts=parts, speculative_mtp_tokens=3, **options)
        found = planners[-1].found
        firsts = [(guess.tokens[0], theirs.reference(guess.known, 1)[0]) for guess in found]
        wholes = [
            (guess.tokens, theirs.reference(guess.known, 3)[: len(guess.tokens)])
            for guess in found[::4]
        ]
        assert len(found) > 50
        for pairs in (firsts, wholes):
            assert sum(ours == expected for ours, expected in pairs) > 0.9 * len(pairs), changed
