"""A model split over ranks computes what the whole one does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.attention.base import AttentionSetting, Chunks
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.config import EngineOptions
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.delta_runs import Run, Runs
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.model_check import checked_spec
from minisgl_backend.models.build import build_model
from minisgl_backend.models.token_mixing import RecurrentRows
from minisgl_backend.parallel.group import Group, OneRank
from tests.conformance.checkpoints import CASES, write_checkpoint
from tests.conformance.quantized_checkpoints import write_quantized
from tests.parallel.threads import on_ranks

CPU = torch.device("cpu")
PAGE_SIZE = 16


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
        "laguna",
        "laguna-by-layer",
        "gemma2",
        "lfm2-biases",
        "lfm2-moe",
        "lfm3",
        "olmo-hybrid",
        "kimi-linear",
        "qwen3-vl-experts",
        "qwen3.5-tied",
        "qwen3-next-sparse",
        "gpt-oss",
        "llama4",
        "llama4-multimodal",
        "deepseek-v2-lite",
        "deepseek-v3",
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
        "granite-shared",
        "afmoe",
        "nemotron-h-experts",
        "nemotron-h-latent",
        "awq-64-moe",
        "mxfp4-stacked-moe",
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
    shape = spec.attention_shape(group.size)
    model = build_model(
        spec,
        folder,
        dtype=torch.float32,
        device=CPU,
        group=group,
        max_sequence_length=64,
        whole_experts=expert_parallel,
    )
    length = 40
    setting = AttentionSetting(
        shape=shape,
        page_size=PAGE_SIZE,
        max_sequence_length=64,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        max_batch_size=1,
        max_captured_batch_size=0,
        device=CPU,
    )
    kv = KVStorage(shape, num_pages=4, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU)
    model.bind_pages(kv.layers)
    recurrent = None
    if (delta := spec.recurrent) is not None:
        states = StateStorage(
            delta.of_rank(group.size),
            num_rows=1,
            num_snapshots=0,
            dtype=torch.float32,
            state_dtype=torch.float32,
            device=CPU,
        )
        model.bind_states(states.layers)
        runs = Runs.of([Run(0, length, 0, position=0)], torch.from_numpy)
        recurrent = RecurrentRows(torch.empty(0, dtype=torch.int64), runs)
    offsets, ends = np.array([0, length], np.int32), np.array([length], np.int32)
    attend_chunks = choose_attention(None, setting).prefill.plan_chunks(
        Chunks(
            rows=torch.zeros(1, dtype=torch.int32),
            offsets=torch.from_numpy(offsets),
            ends=torch.from_numpy(ends),
            page_table=torch.arange(4, dtype=torch.int32)[None],
            max_length=length,
            max_end=length,
            host_offsets=offsets,
            host_ends=ends,
        )
    )

    def attend(q: Tensor, pages: PagedKV, layer: int) -> Tensor:
        out = q.new_empty(*q.shape[:2], pages.values.shape[-1])
        attend_chunks(out, q, pages, layer)
        return out

    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, spec.vocab_size, length))
    with torch.inference_mode():
        places = torch.arange(length)
        return model.logits(model(tokens, places, places, attend, recurrent))


def _drop_last_token(folder: Path) -> None:
    """255 tokens do not split evenly over ranks."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 255}))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:255].contiguous()
    save_file(tensors, folder / "model.safetensors")
