"""An MTP layer on a GPU: tokens are those without it, and its guesses those of the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_backend.cache.kv import KVCache
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.parts import STANDARD
from minisgl_backend.runtime.ports import Scheduler
from minisgl_backend.scheduling.scheduler import SchedulerConfig
from tests.conformance.checked_guesses import CheckedGuesses
from tests.conformance.checkpoints import VOCAB_SIZE
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.conformance.mtp_checkpoints import reference_guesses, write_mtp_checkpoint
from tests.conformance.test_mtp_guesses import GREEDY, SAMPLED
from tests.gpu.test_guesses import WAYS, served

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

SAMPLING: Final = [GREEDY] * 5 + [SAMPLED]
CASES: Final = ("qwen3.5", "qwen3.5-experts", "glm4-moe", "deepseek-v3")


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_without_guesses(case: str, tmp_path: Path) -> None:
    """With each way to run steps, and beside guesses that are looked up."""
    write_mtp_checkpoint(case, tmp_path, predictable=True)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=7, count=len(SAMPLING)
    )
    plain, _ = served(tmp_path, prompts, SAMPLING)
    for changed in [*WAYS, {"speculative_tokens": 5}]:
        tokens, stats = served(tmp_path, prompts, SAMPLING, speculative_mtp_tokens=3, **changed)
        assert tokens == plain, changed
        assert stats.num_right_guesses > stats.num_guesses / 2


@pytest.mark.parametrize("case", CASES)
def test_guesses_are_those_of_the_reference(case: str, tmp_path: Path) -> None:
    """But for near ties. A layer with random weights depends on all of its inputs."""
    theirs = write_mtp_checkpoint(case, tmp_path)
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
        served(tmp_path, prompts, SAMPLING, parts=parts, speculative_mtp_tokens=3, **options)
        found = planners[-1].found
        firsts = [
            (guess.tokens[0], reference_guesses(theirs, guess.known, 1)[0]) for guess in found
        ]
        wholes = [
            (guess.tokens, reference_guesses(theirs, guess.known, 3)[: len(guess.tokens)])
            for guess in found[::4]
        ]
        assert len(found) > 50
        for pairs in (firsts, wholes):
            assert sum(ours == expected for ours, expected in pairs) > 0.9 * len(pairs), changed
