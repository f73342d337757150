"""Tokens of quantized checkpoints equal those of transformers with the numbers they stand for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.kv_scales import read_kv_scales
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.request import IntArray
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes
from tests.conformance.quantized_checkpoints import (
    CASES,
    fp8_blocks,
    plain,
    write_quantized,
    write_with,
)
from tests.conformance.test_ranks import logits_of_prompt
from tests.conformance.test_tokens_equal_transformers import GREEDY, Answers
from tests.parallel.threads import on_ranks

NUM_REQUESTS: Final = 9


@dataclass(frozen=True)
class Reference:
    """A quantized checkpoint, prompts, and what transformers answers to each alone."""

    folder: Path
    prompts: list[IntArray]
    answers: Answers


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_quantized(request.param, folder)
    prompts = prompts_with_shared_prefixes(
        vocab_size=VOCAB_SIZE, longest=60, seed=11, count=NUM_REQUESTS
    )
    return Reference(folder, prompts, Answers([theirs] * NUM_REQUESTS, prompts))


@pytest.mark.parametrize("reference", CASES, indirect=True)
def test_tokens_are_those_of_the_numbers(reference: Reference) -> None:
    """Weights are dequantized while they load, or kept as they are; the cache is cold or warm."""
    for keep_quantized in (False, True):
        model = load_model(reference.folder, context=CONTEXT, keep_quantized=keep_quantized)
        assert _is_quantized(model) == keep_quantized
        with TinyEngine(model, page_size=16, context=CONTEXT) as engine:
            for is_warm in (False, True):
                outcome = engine.run(reference.prompts, [GREEDY] * NUM_REQUESTS)
                assert outcome.tokens == reference.answers.tokens(outcome.tokens)
                assert not is_warm or outcome.num_cached_tokens > 0


@pytest.mark.parametrize("reference", CASES, indirect=True)
def test_two_ranks_compute_what_one_does(reference: Reference) -> None:
    """The ranks' edges cut blocks and groups: 160 of down_proj's 320 inputs, 64 of 128 queries."""
    whole = logits_of_prompt(reference.folder, OneRank())
    for logits in on_ranks(2, lambda group: logits_of_prompt(reference.folder, group)):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", ["quantized-dense", "quantized-moe"])
def test_weights_are_converted_while_they_load(model: str, tmp_path: Path) -> None:
    """They are converted as by ``fp8_blocks``; also on two ranks, which cut blocks."""
    theirs = write_with(plain, tmp_path, model=model)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB_SIZE, 40))
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    found = [logits_of_prompt(tmp_path, OneRank(), "fp8")]
    found += on_ranks(2, lambda group: logits_of_prompt(tmp_path, group, "fp8"))
    for logits in found:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    exact = logits_of_prompt(tmp_path, OneRank())
    assert (found[0] - exact).abs().max() > 1e-2


@pytest.mark.parametrize("size", [1, 2])
def test_experts_with_gates_and_ups_apart_in_fp8(size: int, tmp_path: Path) -> None:
    """Each in one tensor of all experts, as in Step 3.5, where all else is plain."""
    write_checkpoint("step3.7", tmp_path)
    path, config_path = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(path)
    numbers = dict(tensors)
    for name in [name for name in tensors if re.search(r"\.moe\.\w+_proj\.weight$", name)]:
        packed = [fp8_blocks(weight, size=16) for weight in tensors[name]]
        numbers[name] = torch.stack([own for _, own in packed])
        tensors[name] = torch.stack([parts["weight"] for parts, _ in packed])
        scales = torch.stack([parts["weight_scale_inv"] for parts, _ in packed])
        tensors[f"{name}_scale_inv"] = scales
    save_file(numbers, path)
    expected = logits_of_prompt(tmp_path, OneRank())
    save_file(tensors, path)
    others = ["lm_head", "self_attn", "share_expert", "moe.gate", "model.layers.0.mlp"]
    of_experts = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    given = {**of_experts, "modules_to_not_convert": others}
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps({**config, "quantization_config": given}))
    for logits in on_ranks(size, lambda group: logits_of_prompt(tmp_path, group)):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_exponents_take_no_factors(tmp_path: Path) -> None:
    of_other = CASES["ct-mxfp4-moe"]
    write_with(of_other.pack, tmp_path, model="quantized-falcon", plain_in=of_other.plain_in)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": dict(of_other.config or {})}))
    with pytest.raises(ConfigError, match="has exponents, which a factor of the model cannot"):
        logits_of_prompt(tmp_path, OneRank())


def test_experts_in_turn_are_not_converted(tmp_path: Path) -> None:
    write_checkpoint("gpt-oss", tmp_path)
    with pytest.raises(ConfigError, match=r"experts in fp8 in blocks .* are not supported"):
        logits_of_prompt(tmp_path, OneRank(), "fp8")


def test_experts_in_turn_are_refused_in_nvfp4(tmp_path: Path) -> None:
    write_checkpoint("gpt-oss", tmp_path)
    path = tmp_path / "config.json"
    given = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": given}))
    with pytest.raises(ConfigError, match=r"experts in fp4 in groups of 16 are not supported"):
        logits_of_prompt(tmp_path, OneRank())


def test_one_tensor_of_all_experts_is_refused_in_nvfp4(tmp_path: Path) -> None:
    """As ModelOpt writes Llama 4. The scales have no place, so those of single experts are
    missing."""
    write_quantized("modelopt-mixed-hybrid-moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    experts = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.down_proj\.(\w+)")
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors):
        if (match := experts.fullmatch(name)) is not None:
            kind = match[3].removeprefix("weight")
            stacks.setdefault(f"{match[1]}.down_proj{kind}", []).append(tensors.pop(name))
    assert any(name.endswith("down_proj_scale_2") for name in stacks)
    save_file(tensors | {name: torch.stack(parts) for name, parts in stacks.items()}, path)
    with pytest.raises(ConfigError, match=r"lacks .*experts\.0\.down_proj\.weight_scale"):
        logits_of_prompt(tmp_path, OneRank())


@pytest.mark.parametrize("case", ["ct-fp8-channel-moe", "ct-nvfp4-moe"])
def test_quantized_weights_go_with_fp8_pages_and_their_scales(case: str, tmp_path: Path) -> None:
    """A checkpoint with both answers the same as its numbers with the same scales."""
    write_quantized(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = {**scheme, "symmetric": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for folder in (tmp_path, tmp_path / "numbers"):
        tensors = load_file(folder / "model.safetensors")
        for layer in range(2):
            attention = f"model.layers.{layer}.self_attn"
            tensors[f"{attention}.k_scale"] = torch.tensor(0.02 + 0.01 * layer)
            tensors[f"{attention}.v_scale"] = torch.tensor(0.03)
        save_file(tensors, folder / "model.safetensors")
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=5)
    answers = []
    for folder in (tmp_path, tmp_path / "numbers"):
        model = load_model(folder, context=CONTEXT)
        scales = read_kv_scales(folder, 2, model.spec.names)
        assert scales[1].k == pytest.approx(0.03)
        options: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "scales": scales}
        with TinyEngine(model, page_size=16, context=CONTEXT, **options) as engine:
            answers.append(engine.run(prompts, [GREEDY] * len(prompts)).tokens)
    assert answers[0] == answers[1]


def _is_quantized(model: Decoder) -> bool:
    return any(name.endswith(".codes") for name, _ in model.named_parameters())
