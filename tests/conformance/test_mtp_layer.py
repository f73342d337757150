"""The MTP layer computes what plain PyTorch does, whole and split over ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.quantized import dequantized, quantize
from minisgl_backend.layers.matrix import DenseMatrix
from minisgl_backend.layers.quantized_matrix import QuantizedMatrix
from minisgl_backend.model_check import checked_spec
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.checkpoint import check_weights, weight_files
from minisgl_backend.models.mtp import MTPLayer
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import SelfAttention
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.weight_format import Encoding
from tests.conformance.mtp_checkpoints import (
    BEHIND,
    BESIDE,
    MTPReference,
    reference_guesses,
    write_mtp_checkpoint,
)
from tests.conformance.prompt_on_rank import CPU, PromptOnRank
from tests.parallel.threads import on_ranks

CASES: Final = (*BESIDE, *BEHIND)
LENGTH: Final = 40
COUNT: Final = 3
"""Number of guesses."""


def spec_of(folder: Path, quantization: str | None = None) -> ModelSpec:
    return checked_spec(EngineOptions(quantization=quantization), folder, None).with_mtp()


def tokens_of(spec: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(spec.vocab_size, (LENGTH,), generator=generator)


@torch.inference_mode()
def chain(
    spec: ModelSpec, folder: Path, group: Group, given: Tensor | None = None
) -> tuple[Tensor, Tensor, list[int]]:
    """The normalized states of the model and of its MTP layer, and the guesses after the tokens.
    The layer reads the model's own states or those ``given``."""
    prompt, tokens = PromptOnRank.load(spec, folder, group), tokens_of(spec)
    model = prompt.model
    hidden = model.first_mtp_states(prompt.output(tokens[:-1]).for_mtp)
    states = [prompt.mtp_states(tokens[1:], hidden if given is None else given, 0)]
    guesses = [int(model.best_mtp_tokens(states[-1][-1:]))]
    while len(guesses) < COUNT:  # from its own states, at the positions behind
        last, guess = states[-1][-1:], torch.tensor(guesses[-1:])
        states.append(prompt.mtp_states(guess, last, LENGTH - 2 + len(guesses)))
        guesses.append(int(model.best_mtp_tokens(states[-1])))
    return hidden, torch.cat(states), guesses


@pytest.mark.parametrize("case", CASES)
def test_states_and_guesses_equal_the_reference(case: str, tmp_path: Path) -> None:
    reference = write_mtp_checkpoint(case, tmp_path)
    spec = spec_of(tmp_path)
    tokens = tokens_of(spec)
    with torch.no_grad():
        their_hidden = reference.hidden_of(tokens[:-1])
        theirs, their_states = reference.guesses(tokens, COUNT)
    hidden, states, guesses = chain(spec, tmp_path, OneRank(), their_hidden)
    # a recurrent state passes rounding errors on from token to token
    torch.testing.assert_close(hidden, their_hidden, atol=5e-4, rtol=1e-3)
    torch.testing.assert_close(states, their_states, atol=1e-4, rtol=1e-4)
    assert guesses == theirs == reference_guesses(reference, tokens.tolist(), COUNT)


def test_a_rounded_head_guesses_like_its_numbers(tmp_path: Path) -> None:
    """Those of the output head in 8 bits, with one scale for each token; whole and split over
    ranks."""
    case = next(iter(BEHIND))
    write_mtp_checkpoint(case, tmp_path)
    spec = spec_of(tmp_path)
    states = torch.randn(50, spec.hidden_size, generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def guessed(group: Group) -> tuple[Tensor, Tensor]:
        """The guesses, and this rank's part of the head's numbers."""
        model = PromptOnRank.load(spec, tmp_path, group).model
        head, mtp = model.head.matrix, model.mtp
        assert isinstance(head, DenseMatrix) and isinstance(mtp, MTPLayer)
        weight = quantize(head.weight, Encoding.E4M3, (1, spec.hidden_size))
        mtp.round_head(model.head)
        return model.best_mtp_tokens(states), dequantized(weight, torch.float32)

    for num_ranks in (1, 2):
        found = on_ranks(num_ranks, guessed)
        numbers = torch.cat([numbers for _, numbers in found])[: spec.vocab_size]
        for tokens, _ in found:
            assert torch.equal(tokens, (states @ numbers.t()).argmax(dim=-1).int())


@pytest.mark.parametrize("case", CASES)
def test_ranks_compute_the_same(case: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(case, tmp_path)
    spec = spec_of(tmp_path)
    hidden, states, guesses = chain(spec, tmp_path, OneRank())
    for _, of_rank, found in on_ranks(2, lambda group: chain(spec, tmp_path, group, hidden)):
        torch.testing.assert_close(of_rank, states, atol=1e-4, rtol=1e-4)
        assert found == guesses


@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3"])
def test_the_reference_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    mtp_model = pytest.importorskip("transformers.modeling_layers").MtpModel
    reference = write_mtp_checkpoint(case, tmp_path)
    model = type(reference.model).from_pretrained(tmp_path).eval()
    # the class knows the number of the layer in published models
    layer = len(model.get_decoder().layers)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\."]
    theirs = mtp_model.from_pretrained(model).eval()
    tokens = torch.arange(7, 7 + LENGTH)
    with torch.no_grad():
        hidden, places = reference.hidden_of(tokens[:-1]), torch.arange(LENGTH - 1)[None]
        states = theirs.forward_layer(0, hidden[None], places, None, input_ids=tokens[None, 1:])
        torch.testing.assert_close(reference.states(tokens[1:], hidden), states[0])


@pytest.mark.parametrize("case", ["qwen3.5", "glm4-moe"])
def test_a_model_without_the_layer_is_as_before(case: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(case, tmp_path)
    spec = checked_spec(EngineOptions(), tmp_path, None)
    prompt = PromptOnRank.load(spec, tmp_path, OneRank())
    assert prompt.model.mtp is None and len(prompt.model.layers) == spec.num_layers
    with_it = spec.with_mtp()
    assert len(with_it.attention_layers) == len(spec.attention_layers) + 1
    with torch.inference_mode():
        hidden = prompt.model.normed(prompt.residual(tokens_of(spec)[:-1]))
    torch.testing.assert_close(hidden, chain(with_it, tmp_path, OneRank())[0], atol=0, rtol=0)


@pytest.mark.parametrize("case", ["qwen3.5", "glm4-moe"])
def test_the_layer_is_converted_like_the_others(case: str, tmp_path: Path) -> None:
    write_mtp_checkpoint(case, tmp_path)
    weights = []
    for quantization in (None, "fp8"):
        spec = spec_of(tmp_path, quantization)
        mtp = PromptOnRank.load(spec, tmp_path, OneRank()).model.mtp
        assert isinstance(mtp, MTPLayer) and isinstance(mtp.eh_proj.matrix, DenseMatrix)
        weights.append(mtp.eh_proj.matrix.weight)
    assert not torch.equal(*weights)
    torch.testing.assert_close(*weights, atol=0.01, rtol=0.07)


@pytest.mark.parametrize("case", ["qwen3.5", "glm4-moe"])
def test_quantized_checkpoints(case: str, tmp_path: Path) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    write_mtp_checkpoint(case, plain)
    shutil.copytree(plain, quantized)
    _quantize(plain, quantized)
    spec = spec_of(quantized)
    _, states, guesses = chain(spec_of(plain), plain, OneRank())
    _, found, found_guesses = chain(spec, quantized, OneRank())
    torch.testing.assert_close(found, states, atol=1e-4, rtol=1e-4)
    assert found_guesses == guesses
    assert spec.weights is not None
    for load_format in ("auto", "dummy"):
        model = build_model(
            spec,
            quantized,
            dtype=torch.float32,
            device=CPU,
            group=OneRank(),
            load_format=load_format,
            kernels=KernelChoices(keep_quantized=True),
        )
        assert isinstance(model.mtp, MTPLayer) and isinstance(model.mtp.mixer, SelfAttention)
        assert isinstance(model.mtp.mixer.o_proj.matrix, QuantizedMatrix)
        assert isinstance(model.mtp.eh_proj.matrix, DenseMatrix) == (case == "qwen3.5")


def _quantize(plain: Path, quantized: Path) -> None:
    """Write projections in FP8 with a scale per block, as DeepSeek and Qwen do, and the numbers
    that they stand for in place of the plain ones."""
    stay = ["linear_attn", "mtp.fc", "lm_head", "gate"]
    config = json.loads((plain / "config.json").read_text())
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": stay}
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    tensors = load_file(plain / "model.safetensors")
    codes = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight") or "linear_attn" in name or "gate." in name:
            codes[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        codes[name] = (tensor / scale).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in tensor.shape]
        codes[f"{name}_scale_inv"] = scale.repeat(*blocks)
        tensors[name] = codes[name].float() * scale
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(codes, quantized / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("case", ["qwen3.5-experts", "hy-v3", "deepseek-v3", "bailing-hybrid"])
def test_a_checkpoint_without_its_tensors_is_refused(case: str, tmp_path: Path) -> None:
    reference = write_mtp_checkpoint(case, tmp_path)
    spec, path = spec_of(tmp_path), tmp_path / "model.safetensors"
    check_weights(spec, weight_files(tmp_path, spec.names))
    whole = load_file(path)
    norm, projection = _names(case, spec, reference)
    save_file({name: whole[name] for name in whole if name != norm}, path)
    with pytest.raises(ConfigError, match=f"lacks.* {norm}"):
        PromptOnRank.load(spec, tmp_path, OneRank())
    layer = projection.rpartition(".")[0].rpartition(".")[0] + "."
    save_file({name: whole[name] for name in whole if not name.startswith(layer)}, path)
    with pytest.raises(
        ConfigError, match=f"MTP layer, which the checkpoint lacks, such as {projection}"
    ):
        check_weights(spec, weight_files(tmp_path, spec.names))


def _names(case: str, spec: ModelSpec, reference: MTPReference) -> tuple[str, str]:
    """The names in a checkpoint of the layer's final norm, and of what joins its inputs."""
    if case in BESIDE:
        return "mtp.norm.weight", "mtp.fc.weight"
    layer = f"model.layers.{spec.num_layers}."
    norm = "final_layernorm" if case in ("hy-v3", "bailing-hybrid") else "shared_head.norm"
    return f"{layer}{norm}.weight", f"{layer}eh_proj.weight"


def test_adapters_are_for_the_other_layers(tmp_path: Path) -> None:
    write_mtp_checkpoint("glm4-moe", tmp_path)
    spec = spec_of(tmp_path)
    model = PromptOnRank.load(spec, tmp_path, OneRank()).model
    slots = AdapterSlots(model, 1, 8, CPU)
    last = f"model.layers.{spec.num_layers}."
    assert slots.projections and not any(name.startswith(last) for name in slots.projections)


@pytest.mark.parametrize("case", ["qwen3.5", "glm4-moe"])
def test_numbers_that_overflow_leave_keys_and_values_finite(case: str, tmp_path: Path) -> None:
    """As they may in float16: those of the projection that joins inputs, and of states."""
    write_mtp_checkpoint(case, tmp_path)
    spec = spec_of(tmp_path)
    prompt, tokens = PromptOnRank.load(spec, tmp_path, OneRank()), tokens_of(spec)
    mtp = prompt.model.mtp
    assert isinstance(mtp, MTPLayer) and isinstance(mtp.eh_proj.matrix, DenseMatrix)
    assert isinstance(mtp.mixer, SelfAttention)
    kv, unwritten = mtp.mixer.kv, 7.0
    with torch.inference_mode():
        kv.keys.fill_(unwritten)
        kv.values.fill_(unwritten)
        mtp.eh_proj.matrix.weight.mul_(torch.finfo(torch.float32).max)
        first = prompt.model.first_mtp_states(prompt.output(tokens[:-1]).for_mtp)
        last = prompt.mtp_states(tokens[1:], first, 0)[-1:]
        last[:, 0] = torch.inf
        prompt.mtp_states(tokens[:1], last, LENGTH - 1)
    for numbers in (kv.keys.flatten(0, 1), kv.values.flatten(0, 1)):
        assert numbers.isfinite().all() and (numbers[:LENGTH] != unwritten).all()


def test_packed_weights_give_the_same(tmp_path: Path) -> None:
    write_mtp_checkpoint("qwen3.5-experts", tmp_path)
    prompt = PromptOnRank.load(spec_of(tmp_path), tmp_path, OneRank())
    mtp = prompt.model.mtp
    assert isinstance(mtp, MTPLayer) and isinstance(mtp.eh_proj.matrix, DenseMatrix)
    tokens, hidden = torch.arange(9), torch.linspace(-1, 1, 9 * 64).view(9, 64)
    with torch.inference_mode():
        states = prompt.mtp_states(tokens, hidden, 0)
        prompt.model.pack()
        torch.testing.assert_close(prompt.mtp_states(tokens, hidden, 0), states)
