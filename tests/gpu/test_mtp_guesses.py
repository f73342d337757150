"""An MTP layer on a GPU: tokens are those without it, and its guesses at them are mostly right."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from minisgl_backend.kernels.dispatch import is_interpreted
from tests.conformance.checkpoints import VOCAB_SIZE
from tests.conformance.engines import prompts_with_shared_prefixes
from tests.conformance.mtp_checkpoints import write_mtp_checkpoint
from tests.conformance.test_mtp_guesses import GREEDY, SAMPLED
from tests.gpu.test_guesses import WAYS, served

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

SAMPLING: Final = [GREEDY] * 5 + [SAMPLED]


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3.5-experts", "glm4-moe", "deepseek-v3"])
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
