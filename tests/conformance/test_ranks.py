"""A model split over ranks computes what the whole one does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.config import EngineOptions
from minisgl_backend.model_check import checked_spec
from minisgl_backend.parallel.group import Group, OneRank
from tests.conformance.checkpoints import CASES, write_checkpoint
from tests.conformance.prompt_on_rank import PromptOnRank
from tests.conformance.quantized_checkpoints import write_quantized
from tests.parallel.threads import on_ranks


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        "llama-biases",
        "odd-vocabulary",
        "qwen3-moe",
        "mixtral",
        "mistral3-tied",
        "phi3-partial",
        "olmo2-biases",
        "gemma3-seeing",
        "gemma4-merged",
        "gemma4-per-layer",
        "gemma4-experts",
        "granite-tied",
        "smollm3",
        "qwen2-moe",
        "glm4-moe-groups",
        "minimax-m2",
        "exaone4",
        "glm4",
        "ernie-biases",
        "ernie-moe",
        "olmoe-normalized",
        "granite-moe",
        "hunyuan-yarn",
        "hunyuan-moe",
        "exaone-moe-groups",
        "solar-open",
        "hy-v3-biases",
        "mellum-sparse",
        "hyperclova-biases",
        "internlm3-biases",
        "granite-swa-biases",
        "granite-moe-swa-shared",
        "afmoe",
        "bamba-biases",
        "falcon-h1-norm",
        "granite-hybrid",
        "granite-hybrid-dense",
        "nemotron-h",
        "nemotron-h-experts",
        "nemotron-h-latent",
        "arcee-biases",
        "apertus",
        "cohere-biases",
        "cohere2",
        "cohere2-moe",
        "starcoder2",
        "flex-olmo",
        "kolibri1",
        "flint",
        "muse-glimmer",
        "minicpm3",
        "nanochat",
        "laguna",
        "laguna-by-layer",
        "step3.7",
        "gemma2",
        "lfm2-biases",
        "lfm2-moe",
        "lfm3",
        "olmo-hybrid",
        "kimi-linear",
        "bailing-hybrid",
        "qwen3-vl-experts",
        "qwen3.5-tied",
        "qwen3-next-sparse",
        "gpt-oss",
        "llama4",
        "llama4-multimodal",
        "deepseek-v2-lite",
        "axk1",
        "opt",
        "gpt2",
        "gpt-bigcode",
        "gptj",
        "gpt-neox",
        "stablelm-parallel",
        "olmo-biases",
        "falcon-groups",
        "deepseek-v3",
        "glm-moe-dsa-shared",
        "hy-v4-alike",
        "glm4-moe-lite",
        "mistral4-groups",
    ],
)
def test_logits_are_equal(case: str, size: int, tmp_path: Path) -> None:
    if case == "odd-vocabulary":
        write_checkpoint("qwen3", tmp_path)
        _drop_last_token(tmp_path)
    else:
        write_checkpoint(case, tmp_path)
    whole = logits_of_prompt(tmp_path, OneRank())
    for logits in on_ranks(size, lambda group: logits_of_prompt(tmp_path, group)):
        assert logits.shape == whole.shape
        # a recurrent state passes rounding errors on from token to token
        atol = 5e-4 if case.startswith("qwen3.5") else 1e-4
        torch.testing.assert_close(logits, whole, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        "qwen2-moe",
        "glm4-moe-groups",
        "gemma4-experts",
        "ernie-moe",
        "granite-moe",
        "exaone-moe",
        "hy-v3",
        "hy-v4",
        "granite-shared",
        "afmoe",
        "nemotron-h-experts",
        "nemotron-h-latent",
        "awq-64-moe",
        "mxfp4-stacked-moe",
        "ct-nvfp4-moe",
        "modelopt-mixed-mamba",
        "modelopt-mixed-in-8-bits-moe",
        "gpt-oss",
        "mxfp4-gpt-oss",
        "llama4",
        "deepseek-v2",
    ],
)
def test_logits_of_whole_experts_are_equal(case: str, size: int, tmp_path: Path) -> None:
    """Other ranks' experts are not read, from files with a tensor per expert or one for all."""
    if case in CASES:
        write_checkpoint(case, tmp_path)
    else:
        write_quantized(case, tmp_path)

    def work(group: Group) -> Tensor:
        return logits_of_prompt(tmp_path, group, expert_parallel=True)

    whole = logits_of_prompt(tmp_path, OneRank())
    for logits in on_ranks(size, work):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


def logits_of_prompt(
    folder: Path,
    group: Group,
    quantization: str | None = None,
    *,
    expert_parallel: bool = False,
) -> Tensor:
    """Logits of every position of one prompt on a rank of the group; ``quantization`` and
    ``expert_parallel`` are as in the options."""
    spec = checked_spec(EngineOptions(quantization=quantization), folder, None)
    prompt = PromptOnRank.load(spec, folder, group, whole_experts=expert_parallel)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, spec.vocab_size, 40))
    with torch.inference_mode():
        return prompt.model.logits(prompt.residual(tokens))


def _drop_last_token(folder: Path) -> None:
    """255 tokens do not split evenly over ranks."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 255}))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:255].contiguous()
    save_file(tensors, folder / "model.safetensors")
