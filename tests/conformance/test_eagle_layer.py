"""An EAGLE-3 layer computes what plain PyTorch does, whole and split over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.matrix import DenseMatrix
from minisgl_backend.model_check import checked_spec
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.build import build_model
from minisgl_backend.models.eagle import EagleLayer
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.parallel.group import Group, OneRank
from tests.conformance.eagle_checkpoints import FORMS, write_eagle_checkpoint
from tests.conformance.prompt_on_rank import CPU, PromptOnRank
from tests.parallel.threads import on_ranks

MODELS: Final = ("qwen3", "llama", "qwen3-moe", "gpt-oss")
LENGTH: Final = 40
COUNT: Final = 3
"""Number of guesses."""


def spec_of(folder: Path, **options: Any) -> ModelSpec:
    """The model in ``folder / "model"`` with the layer in ``folder / "eagle"``."""
    given = EngineOptions(
        speculative_mtp_tokens=COUNT, speculative_mtp_model=str(folder / "eagle"), **options
    )
    return checked_spec(given, folder / "model", None)


def load(folder: Path, group: Group) -> PromptOnRank:
    spec = spec_of(folder)
    return PromptOnRank.load(spec, folder / "model", group, eagle=folder / "eagle")


def tokens_of(vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (LENGTH,), generator=generator)


@torch.inference_mode()
def chain(folder: Path, group: Group) -> tuple[Tensor, Tensor, list[int]]:
    """What the layer reads of the model, its states, and the guesses after the tokens."""
    prompt = load(folder, group)
    model, tokens = prompt.model, tokens_of(prompt.model.spec.vocab_size)
    read = prompt.output(tokens[:-1]).for_mtp
    states = [prompt.mtp_states(tokens[1:], model.first_mtp_states(read), 0)]
    guesses = [int(model.best_mtp_tokens(states[-1][-1:]))]
    while len(guesses) < COUNT:  # from its own states, at the positions behind
        last, guess = states[-1][-1:].clone(), torch.tensor(guesses[-1:])
        states.append(prompt.mtp_states(guess, last, LENGTH - 2 + len(guesses)))
        guesses.append(int(model.best_mtp_tokens(states[-1])))
    return read, torch.cat(states), guesses


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", MODELS)
def test_states_and_guesses_equal_the_reference(case: str, form: str, tmp_path: Path) -> None:
    reference = write_eagle_checkpoint(case, tmp_path, FORMS[form])
    tokens = tokens_of(reference.vocab_size)
    with torch.no_grad():
        their_read = reference.streams_of(tokens[:-1])
        theirs, their_states = reference.guesses(tokens, COUNT)
    read, states, guesses = chain(tmp_path, OneRank())
    torch.testing.assert_close(read, their_read, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(states, their_states, atol=1e-3, rtol=1e-3)
    assert guesses == theirs


@pytest.mark.parametrize("case", ["qwen3.5", "granite", "mistral-window"])
def test_other_models(case: str, tmp_path: Path) -> None:
    """With recurrent layers, with a residual stream that is kept divided by a number, and with
    scores of another scale."""
    reference = write_eagle_checkpoint(case, tmp_path, FORMS["named"])
    tokens = tokens_of(reference.vocab_size)
    with torch.no_grad():
        theirs, their_states = reference.guesses(tokens, COUNT)
    _, states, guesses = chain(tmp_path, OneRank())
    torch.testing.assert_close(states, their_states, atol=2e-3, rtol=2e-3)
    assert guesses == theirs


@pytest.mark.parametrize(
    ("case", "form"), [("qwen3", "default"), ("llama", "speculators"), ("gpt-oss", "head-norms")]
)
def test_ranks_compute_the_same(case: str, form: str, tmp_path: Path) -> None:
    write_eagle_checkpoint(case, tmp_path, FORMS[form])
    _, states, guesses = chain(tmp_path, OneRank())
    for _, of_rank, found in on_ranks(2, lambda group: chain(tmp_path, group)):
        torch.testing.assert_close(of_rank, states, atol=1e-3, rtol=1e-3)
        assert found == guesses


def test_an_embedding_that_is_the_models_once_more_is_not_loaded(tmp_path: Path) -> None:
    reference = write_eagle_checkpoint("llama", tmp_path, FORMS["named"])
    layer = load(tmp_path, OneRank()).model.eagle
    assert layer is not None and layer.embedding is not None
    path = tmp_path / "eagle" / "model.safetensors"
    embedding = reference.model.get_input_embeddings().weight.detach()
    save_file({**load_file(path), "embed_tokens.weight": embedding}, path)
    layer = load(tmp_path, OneRank()).model.eagle
    assert layer is not None and layer.embedding is None


def test_packed_weights_give_the_same(tmp_path: Path) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, FORMS["named"])
    prompt = load(tmp_path, OneRank())
    model, tokens = prompt.model, torch.arange(9)
    states = torch.linspace(-1, 1, 9 * 64).view(9, 64)
    with torch.inference_mode():
        expected = prompt.mtp_states(tokens, states.clone(), 0)
        best = model.best_mtp_tokens(expected)
        model.pack()
        found = prompt.mtp_states(tokens, states.clone(), 0)
        torch.testing.assert_close(found, expected)
        assert model.best_mtp_tokens(found).tolist() == best.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_numbers_that_overflow_leave_keys_and_values_finite(form: str, tmp_path: Path) -> None:
    """As they may in float16: those of the layer's first states, and of its own."""
    write_eagle_checkpoint("qwen3", tmp_path, FORMS[form])
    prompt = load(tmp_path, OneRank())
    model, tokens = prompt.model, tokens_of(prompt.model.spec.vocab_size)
    assert model.eagle is not None and isinstance(model.eagle.fc.matrix, DenseMatrix)
    kv, unwritten = model.eagle.midlayer.self_attn.kv, 7.0
    with torch.inference_mode():
        kv.keys.fill_(unwritten)
        kv.values.fill_(unwritten)
        model.eagle.fc.matrix.weight.mul_(torch.finfo(torch.float32).max)
        first = model.first_mtp_states(prompt.output(tokens[:-1]).for_mtp)
        assert not first.isfinite().all()
        last = prompt.mtp_states(tokens[1:], first, 0)[-1:]
        last[:, 0] = torch.inf
        prompt.mtp_states(tokens[:1], last, LENGTH - 1)
    for numbers in (kv.keys.flatten(0, 1), kv.values.flatten(0, 1)):
        assert numbers.isfinite().all() and (numbers[:LENGTH] != unwritten).all()


def test_adapters_are_for_the_models_layers(tmp_path: Path) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, FORMS["default"])
    model = load(tmp_path, OneRank()).model
    slots = AdapterSlots(model, 1, 8, CPU)
    assert slots.projections and not any("midlayer" in name for name in slots.projections)


@pytest.mark.parametrize("form", ["default", "named"])
def test_random_weights_need_no_files_but_config_json(form: str, tmp_path: Path) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, FORMS[form])
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    model = build_model(
        spec_of(tmp_path, load_format="dummy"),
        tmp_path / "model",
        dtype=torch.bfloat16,
        device=CPU,
        group=OneRank(),
        load_format="dummy",
    )
    assert model.eagle is not None
    assert model.eagle.d2t.tokens.tolist() == list(range(FORMS[form].num_drafted))


def test_quantization_leaves_the_layer_plain(tmp_path: Path) -> None:
    write_eagle_checkpoint("llama", tmp_path, FORMS["default"])
    layers = []
    for quantization in (None, "fp8"):
        model = PromptOnRank.load(
            spec_of(tmp_path, quantization=quantization),
            tmp_path / "model",
            OneRank(),
            eagle=tmp_path / "eagle",
        ).model
        assert isinstance(model.eagle, EagleLayer)
        layers.append(model.eagle.state_dict())
    for name, tensor in layers[0].items():
        if not name.startswith("lm_head."):  # which has rows that no token reads
            assert torch.equal(tensor, layers[1][name])


@pytest.mark.parametrize(
    "name", ["fc.weight", "d2t", "midlayer.hidden_norm.weight", "lm_head.weight"]
)
def test_a_layer_without_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, FORMS["default"])
    path = tmp_path / "eagle" / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=rf"speculative_mtp_model: the checkpoint lacks {name}"):
        load(tmp_path, OneRank())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", torch.zeros(64, 128), r"fc\.weight has the shape \(64, 128\), the model ne"),
        ("fc.bias", torch.ones(64), r"the model has no place for fc\.bias"),
        ("midlayer.self_attn.q_norm.weight", torch.ones(32), r"no place for midlayer\.self_attn"),
        ("d2t", torch.full((200,), 57), r"d2t makes row 199 of the output head token 256, and the"),
        ("d2t", torch.zeros(200), r"d2t has the type F32, the model needs I64 or I32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, tensor: Tensor, message: str, tmp_path: Path
) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, FORMS["default"])
    path = tmp_path / "eagle" / "model.safetensors"
    save_file({**load_file(path), name: tensor}, path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, OneRank())


def test_the_layer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_eagle_checkpoint("qwen3", tmp_path, FORMS["default"])
    path = tmp_path / "eagle" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "target_hidden_size": 128}))
    with pytest.raises(ConfigError, match="a hidden_size of 64, and the layer was made for 128"):
        spec_of(tmp_path)
