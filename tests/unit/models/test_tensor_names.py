"""Checkpoints whose publishers name or merge tensors in other ways than Llama does."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.build import build_model
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.checkpoint import check_weights, weight_files
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.tensor_names import MULTIMODAL, StoredAs, TensorNames
from minisgl_backend.parallel.group import OneRank
from tests.conformance.checkpoints import write_checkpoint
from tests.unit.models.config_jsons import STEP_3_5_FLASH

MIXTRAL_EXPERTS = ("w1", "w3", "w2")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per case, each with one file."""
    root = tmp_path_factory.mktemp("checkpoints")
    for case in ("mistral3", "mixtral", "phi3", "olmo2", "qwen3.5-experts-multimodal"):
        write_checkpoint(case, root / case)
    return root


def spoilt(checkpoints: Path, case: str, folder: Path, **changes: Tensor | None) -> Path:
    """A copy with tensors replaced, added or (None) dropped; ``__`` stands for a dot."""
    shutil.copytree(checkpoints / case, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def load(folder: Path) -> Decoder:
    spec = load_spec(folder)
    check_weights(spec, weight_files(folder, spec.names))
    return build_model(
        spec, folder, dtype=torch.float32, device=torch.device("cpu"), group=OneRank()
    )


def assert_equal(one: Decoder, other: Decoder) -> None:
    names = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, names.pop(name)), name
    assert not names


def test_a_region_of_a_part_is_a_region_of_the_tensor() -> None:
    part = StoredAs("experts", (4, 6), (2, slice(4, 8)))
    assert part.within([]) == (2, slice(4, 8))
    assert part.within([slice(1, 3)]) == (2, slice(5, 7))
    assert part.within([slice(None), slice(0, 3)]) == (2, slice(4, 8), slice(0, 3))
    assert StoredAs("whole", (4,)).within([slice(1, 2)]) == (slice(1, 2),)


def test_transposed_stacks_are_taken_apart() -> None:
    names = TensorNames(transposed_stacks=True)
    found = dict(names.weights("mlp.experts.gate_up_proj", (2, 6, 8)))
    assert list(found) == [
        f"mlp.experts.{i}.{part}_proj.weight" for i in "01" for part in ("gate", "up")
    ]
    up = found["mlp.experts.1.up_proj.weight"]
    assert (up.shape, up.transposed) == ((4, 6), True)
    assert up.within([]) == (1, slice(0, 6), slice(4, 8))
    assert up.within([slice(1, 3)]) == (1, slice(0, 6), slice(5, 7))
    assert up.within([slice(1, 3), slice(2, 4)]) == (1, slice(2, 4), slice(5, 7))
    down = dict(names.weights("mlp.experts.down_proj", (2, 4, 6)))
    assert down["mlp.experts.0.down_proj.weight"].shape == (6, 4)
    with pytest.raises(ConfigError, match="7 columns are no gates and as many ups"):
        list(names.weights("mlp.experts.gate_up_proj", (2, 6, 7)))
    scale = "mlp.experts.gate_up_proj_scale"  # an unknown tensor
    assert list(names.weights(scale, (2, 1, 8))) == [(scale, StoredAs(scale, (2, 1, 8)))]


def test_stacks_with_the_names_of_modules_are_taken_apart() -> None:
    """As in Step 3.5, plain and in FP8."""
    names = parse_spec(STEP_3_5_FLASH).names
    for part in ("gate", "up", "down"):
        module = f"model.layers.3.moe.{part}_proj"
        for kind in ("weight", "weight_scale_inv"):
            name = f"{module}.{kind}"
            assert dict(names.weights(name, (2, 4, 6))) == {
                f"model.layers.3.mlp.experts.{index}.{part}_proj.{kind}": StoredAs(
                    name, (4, 6), (index,)
                )
                for index in range(2)
            }


@pytest.mark.parametrize(
    ("part", "shape", "of_expert", "transposed"),
    [
        ("gate_up_proj", (2, 8, 6), (4, 6), False),
        ("gate_up_proj", (2, 6, 8), (4, 6), True),
        ("gate_up_proj", (2, 6, 6), (3, 6), False),
        ("down_proj", (2, 6, 4), (6, 4), False),
        ("down_proj", (2, 4, 6), (6, 4), True),
    ],
)
def test_shapes_of_stacks_tell_their_order(
    part: str, shape: tuple[int, ...], of_expert: tuple[int, int], transposed: bool
) -> None:
    names = TensorNames(order_by_hidden_size=6)
    for stored in dict(names.weights(f"mlp.experts.{part}", shape)).values():
        assert (stored.shape, stored.transposed) == (of_expert, transposed)
    # the scales of a checkpoint with blocks of 128 x 128
    names, scales = TensorNames(order_by_hidden_size=6 * 128), f"mlp.experts.{part}_scale_inv"
    found = dict(names.weights(scales, shape))
    assert all(name.endswith("_proj.weight_scale_inv") for name in found)
    for stored in found.values():
        assert (stored.shape, stored.transposed) == (of_expert, transposed)


def test_vectors_with_dimensions_of_one_besides() -> None:
    names = TensorNames(vectors=(".gate.correction",))
    name = "model.layers.1.mlp.gate.correction"
    assert list(names.weights(name, (1, 8))) == [(name, StoredAs(name, (8,), (0, slice(0, 8))))]
    ((_, stored),) = names.weights(name, (1, 1, 8, 1))
    assert stored.shape == (8,) and stored.within([slice(2, 4)]) == (0, 0, slice(2, 4), 0)
    for shape in ((8,), (2, 8)):  # the latter does not fit
        assert list(names.weights(name, shape)) == [(name, StoredAs(name, shape))]


def test_names_in_the_checkpoint_that_are_names_of_other_weights_here() -> None:
    renamed = (".after.", ".middle."), (".last.", ".after."), (".end.", ".last.")
    names = TensorNames(renamed=renamed)
    for theirs, ours in renamed:
        weight = f"model.layers.0{ours}weight"
        assert names.in_checkpoint(weight, None) == f"model.layers.0{theirs}weight"
        assert [name for name, _ in names.weights(f"model.layers.0{theirs}weight", (4,))] == [
            weight
        ]


def test_merged_tensors_are_taken_apart(checkpoints: Path) -> None:
    model = load(checkpoints / "phi3")
    tensors = load_file(checkpoints / "phi3" / "model.safetensors")
    for module in ("model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"):
        held = model.get_parameter(f"{module}.matrix.weight")
        assert torch.equal(held, tensors[f"{module}.weight"])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model__layers__0__self_attn__qkv_proj__weight", None, r"lacks \S+qkv_proj.weight$"),
        ("model__layers__0__self_attn__qkv_proj__weight", torch.ones(127, 64), r"\(127, 64\)"),
        ("model__layers__0__self_attn__qkv_proj__lut", torch.ones(8, 128), "no lut is known"),
        ("model__layers__0__self_attn__qkv_proj__qweight", torch.ones(8, 127), "whose columns"),
        ("model__layers__0__self_attn__q_proj__weight", torch.ones(64, 64), "both hold .*q_proj"),
        ("model__layers__0__self_attn__qkv_proj__bias", torch.ones(128), "no place for .*qkv_proj"),
    ],
)
def test_merged_tensors_that_do_not_fit_are_named(
    checkpoints: Path, tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(spoilt(checkpoints, "phi3", tmp_path, **{name: tensor}))


def test_scales_of_merged_tensors_are_taken_apart() -> None:
    names = TensorNames(merged={".qkv_proj": {"q_proj": 256, "k_proj": 128, "v_proj": 128}})
    weights = {
        kind: dict(names.weights(f"layer.qkv_proj.{kind}", shape))
        for kind, shape in {
            "weight_scale_inv": (4, 3),  # one per 128 rows
            "weight_scale": (),  # one for all
            "input_scale": (1,),
            "input_zero_point": (1,),
            "weight_scale_2": (),
            "weight_global_scale": (1,),
            "input_global_scale": (1,),
        }.items()
    }
    blocks = weights["weight_scale_inv"]["layer.k_proj.weight_scale_inv"]
    assert (blocks.shape, blocks.region) == ((1, 3), (slice(2, 3),))
    of_modelopt = dict(names.weights("layer.qkv_proj.weight_scale", (4, 1, 3, 1)))
    k_proj = of_modelopt["layer.k_proj.weight_scale"]
    assert (k_proj.shape, k_proj.region) == ((1, 1, 3, 1), (slice(2, 3),))
    for kind in weights.keys() - {"weight_scale_inv"}:
        assert {part.region for part in weights[kind].values()} == {()}
        assert list(weights[kind]) == [f"layer.{part}_proj.{kind}" for part in "qkv"]


def test_factors_divide_scales_by_which_is_divided() -> None:
    names = TensorNames(scaled={".o_proj": 4.0})
    factors = {"weight_scale_2": 4.0, "weight_global_scale": 0.25, "input_global_scale": 1.0}
    for kind, factor in factors.items():
        (found,) = names.weights(f"layer.o_proj.{kind}", ())
        assert found[1].scale == factor


def test_codes_of_merged_tensors_are_taken_apart() -> None:
    names = TensorNames(merged={".gate_up_proj": {"gate_proj": 256, "up_proj": 256}})
    for kind, shape, own, region in (
        ("qweight", (16, 64), (16, 32), (slice(0, 16), slice(32, 64))),  # words of 8 outputs
        ("scales", (3, 512), (3, 256), (slice(0, 3), slice(256, 512))),
        ("weight_packed", (512, 16), (256, 16), (slice(256, 512),)),
        ("weight_zero_point", (64, 3), (32, 3), (slice(32, 64),)),
        ("g_idx", (128,), (128,), ()),
    ):
        found = dict(names.weights(f"mlp.gate_up_proj.{kind}", shape))
        up = found[f"mlp.up_proj.{kind}"]
        assert list(found) == [f"mlp.{part}_proj.{kind}" for part in ("gate", "up")]
        assert (up.shape, up.region) == (own, region)
    assert not dict(names.weights("mlp.gate_up_proj.weight_shape", (2,)))


def test_tensors_merged_by_heads_are_taken_apart() -> None:
    merged = {".in_proj": {"q": 8, "v": 16}}
    names = TensorNames(merged=merged, by_head={".in_proj": 4})
    found = dict(names.weights("a.in_proj.weight", (24, 5)))
    v = found["a.v.weight"]
    assert (v.shape, v.joined_at) == ((16, 5), 0)
    rows = [list(range(24))[held[0]] for held in v.regions_within([]) if isinstance(held[0], slice)]
    assert rows == [[2, 3, 4, 5], [8, 9, 10, 11], [14, 15, 16, 17], [20, 21, 22, 23]]
    some = list(v.regions_within([slice(3, 9), slice(1, 2)]))
    assert some == [(slice(s, e), slice(1, 2)) for s, e in ((5, 6), (8, 12), (14, 15))]
    assert list(found["a.q.weight"].regions_within([slice(4, 6)])) == [(slice(12, 14), slice(None))]

    scales = dict(names.weights("a.in_proj.weight_scale_inv", (12, 2)))["a.v.weight_scale_inv"]
    assert [held[0] for held in scales.regions_within([slice(1, 3)])] == [slice(2, 3), slice(4, 5)]
    words = dict(names.weights("a.in_proj.qweight", (5, 12)))["a.v.qweight"]
    assert (words.shape, words.joined_at) == ((5, 8), 1)
    assert list(words.regions_within([slice(None), slice(0, 3)])) == [
        (slice(None), slice(1, 3)),
        (slice(None), slice(4, 5)),
    ]
    of_all = dict(names.weights("a.in_proj.weight_scale_inv", (1, 2)))
    assert {stored.region for stored in of_all.values()} == {()} and len(of_all) == 2
    with pytest.raises(ConfigError, match="whose rows cannot be parts of 8, 16"):
        list(names.weights("a.in_proj.weight_scale_inv", (6, 2)))


def test_stacked_and_single_experts_are_the_same(checkpoints: Path, tmp_path: Path) -> None:
    """The publisher writes one tensor per expert, newer tools one for all."""
    tensors = load_file(checkpoints / "mixtral" / "model.safetensors")
    for layer in range(2):
        theirs, ours = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        gates, ups, downs = (
            torch.stack([tensors.pop(f"{theirs}.experts.{e}.{name}.weight") for e in range(4)])
            for name in MIXTRAL_EXPERTS
        )
        tensors[f"{ours}.experts.gate_up_proj"] = torch.cat([gates, ups], dim=1)
        tensors[f"{ours}.experts.down_proj"] = downs
        tensors[f"{ours}.gate.weight"] = tensors.pop(f"{theirs}.gate.weight")
    shutil.copy(checkpoints / "mixtral" / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), load(checkpoints / "mixtral"))
    del tensors["model.layers.1.mlp.experts.down_proj"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj$"):
        load(tmp_path)


def test_scales_of_stacked_experts_are_taken_apart() -> None:
    names = TensorNames()
    blocks = dict(names.weights("a.experts.gate_up_proj_scale_inv", (3, 4, 2)))
    assert len(blocks) == 6
    up = blocks["a.experts.1.up_proj.weight_scale_inv"]
    assert (up.shape, up.region) == ((2, 2), (1, slice(2, 4)))
    down = dict(names.weights("a.experts.down_proj_scale", (3, 4, 2)))
    assert down["a.experts.2.down_proj.weight_scale"].region == (2,)
    inputs = dict(names.weights("a.experts.gate_up_proj_activation_scale", (3,)))
    assert inputs["a.experts.2.up_proj.input_scale"] == StoredAs(
        "a.experts.gate_up_proj_activation_scale", (), (2,)
    )
    with pytest.raises(ConfigError, match="whose 3 rows are no gates and as many ups"):
        list(names.weights("a.experts.gate_up_proj_scale_inv", (3, 3, 2)))
    whole = "a.experts.gate_up_proj_bias"
    assert [own for own, _ in names.weights(whole, (3, 4))] == [whole]


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    names = TensorNames(left_out=("model.layers.46.",))
    assert not list(names.weights("model.layers.46.eh_proj.weight", (2, 4)))
    assert [own for own, _ in names.weights("model.layers.4.x.weight", (2,))]


def test_a_missing_tensor_has_the_publishers_name(checkpoints: Path, tmp_path: Path) -> None:
    name = "model__layers__1__block_sparse_moe__experts__2__w3__weight"
    with pytest.raises(ConfigError, match=r"lacks .*block_sparse_moe\.experts\.2\.w3\.weight"):
        load(spoilt(checkpoints, "mixtral", tmp_path, **{name: None}))
    name = "language_model__model__norm__weight"
    with pytest.raises(ConfigError, match=r"lacks language_model\.model\.norm\.weight"):
        load(spoilt(checkpoints, "mistral3", tmp_path / "other", **{name: None}))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("lfm2", "model.embed_tokens.weight"),
        ("lfm2", "model.embedding_norm.weight"),
        ("lfm2-vl", "model.language_model.embedding_norm.weight"),
        ("falcon-h1", "model.embed_tokens.weight"),
        ("kimi-linear", "model.layers.0.self_attn.A_log"),
        ("kimi-linear", "model.layers.1.self_attn.f_b_proj.weight"),
        ("kimi-linear", "model.layers.2.self_attn.v_conv1d.weight"),
        ("kimi-linear", "model.layers.2.block_sparse_moe.experts.5.w2.weight"),
        ("kimi-linear", "model.layers.3.self_attn.kv_b_proj.weight"),
        ("bailing-hybrid", "model.word_embeddings.weight"),
        ("bailing-hybrid", "model.layers.0.attention.f_proj.weight"),
        ("bailing-hybrid", "model.layers.1.mlp.gate.expert_bias"),
        ("bailing-hybrid", "model.layers.2.attention.g_proj.weight"),
        ("olmo-hybrid", "model.layers.0.attention_layer_norm.weight"),
        ("olmo-hybrid", "model.layers.1.linear_attn.k_conv1d.weight"),
        ("olmo-hybrid", "model.layers.2.linear_attn.g_proj.weight"),
        ("olmo-hybrid", "model.layers.2.linear_attn.o_norm.weight"),
        ("nemotron-h", "backbone.embeddings.weight"),
        ("kimi-k25", "language_model.model.blocks.0.input_layernorm.weight"),
        ("apertus", "model.layers.1.attention_layernorm.weight"),
        ("apertus", "model.layers.0.mlp.act_fn.alpha_n"),
        ("starcoder2", "model.layers.1.mlp.c_proj.bias"),
        ("starcoder2", "model.norm.bias"),
        ("kolibri1", "model.layers.1.post_ffn_norm.weight"),
        ("kolibri1", "model.layers.4.moe.router.expert_bias"),
        ("laguna", "model.layers.1.self_attn.g_proj.weight"),
        ("laguna", "model.layers.2.mlp.shared_expert.up_proj.weight"),
        ("axk1", "model.layers.1.post_mlp_layernorm.weight"),
        ("step3.7", "model.layers.0.mlp.gate_proj.weight"),
        ("step3.7", "model.layers.1.moe.gate_proj.weight"),
        ("step3.7", "model.layers.1.moe.router_bias"),
        ("step3.7", "model.layers.2.share_expert.up_proj.weight"),
    ],
)
def test_names_that_only_some_publishers_have(tmp_path: Path, case: str, name: str) -> None:
    write_checkpoint(case, tmp_path / case)
    changed = tmp_path / "changed"
    with pytest.raises(ConfigError, match=rf"lacks {re.escape(name)}$"):
        load(spoilt(tmp_path, case, changed, **{name.replace(".", "__"): None}))


def test_corrections_of_zeros_and_needless_norms_of_ax_k1(tmp_path: Path) -> None:
    """transformers saves corrections, which the publisher does not have. Only the publisher has
    norms that are not used."""
    write_checkpoint("axk1", tmp_path / "axk1")
    changes = {f"model__layers__{n}__mlp__gate__e_score_correction_bias": None for n in (1, 2)}
    norm = {"model__layers__0__post_mlp_layernorm__weight": torch.ones(64)}
    load(tmp_path / "axk1")
    load(spoilt(tmp_path, "axk1", tmp_path / "published", **changes, **norm))
    learned = {name: torch.ones(8) for name in changes}
    changed = spoilt(tmp_path, "axk1", tmp_path / "changed", **learned)
    with pytest.raises(
        ConfigError, match=r"no place for .*\.1\.mlp\.gate\.e_score_correction_bias"
    ):
        load(changed)


@pytest.mark.parametrize(
    "name",
    ["embed_tokens.weight", "layers.2.self_attn.k_norm.weight"]
    + [f"layers.0.linear_attn.{end}" for end in ("in_proj_qkv.weight", "conv1d.weight", "A_log")]
    + [f"layers.0.mlp.{end}" for end in ("experts.3.up_proj.weight", "shared_expert_gate.weight")],
)
def test_a_missing_tensor_has_the_checkpoints_own_name(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    """With the prefix that this checkpoint has, and merged or stacked as it is there."""
    name = f"model.language_model.{name}"
    case = "qwen3.5-experts-multimodal"
    with pytest.raises(ConfigError, match=rf"lacks {re.escape(name)}$"):
        load(spoilt(checkpoints, case, tmp_path, **{name.replace(".", "__"): None}))


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
    ],
)
def test_a_missing_head_is_named_as_layers_are(
    checkpoints: Path, tmp_path: Path, prefix: str, head: str
) -> None:
    config = json.loads((checkpoints / "mistral3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = {
        name.replace("language_model.model.", prefix): tensor
        for name, tensor in load_file(checkpoints / "mistral3" / "model.safetensors").items()
        if not name.endswith("lm_head.weight")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"lacks {re.escape(head)}$"):
        load(tmp_path)


def test_what_a_checkpoint_of_layers_alone_lacks_has_no_prefix(
    checkpoints: Path, tmp_path: Path
) -> None:
    tensors = load_file(checkpoints / "olmo2" / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    shutil.copy(checkpoints / "olmo2" / "config.json", tmp_path)
    save_file(bare, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks norm\.weight$"):
        load(tmp_path)


def test_every_spelling_of_a_multimodal_checkpoint(checkpoints: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoints / "mistral3" / "model.safetensors")
    newer = {}
    for name, tensor in tensors.items():
        if name.startswith("language_model.model."):
            name = "model.language_model." + name.removeprefix("language_model.model.")
        elif name.startswith("language_model."):
            name = name.removeprefix("language_model.")
        else:
            name = f"model.{name}"
        newer[name] = tensor
    shutil.copy(checkpoints / "mistral3" / "config.json", tmp_path)
    save_file(newer, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), load(checkpoints / "mistral3"))


def test_a_text_part_that_was_saved_alone_keeps_its_names(
    checkpoints: Path, tmp_path: Path
) -> None:
    """As transformers saves Qwen3.5 once it was loaded without its vision part."""
    whole = checkpoints / "qwen3.5-experts-multimodal"
    tensors = load_file(whole / "model.safetensors")
    config = json.loads((whole / "config.json").read_text())["text_config"]
    architectures = ["Qwen3_5MoeForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": architectures}))
    text = {name: tensors[name] for name in tensors if not name.startswith("model.visual.")}
    assert any(name.startswith("model.language_model.layers.") for name in text)
    save_file(text, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), load(whole))


def test_only_tensors_for_images_and_audio_are_left_out(checkpoints: Path, tmp_path: Path) -> None:
    for name in ("vision_tower.a.weight", "model.multi_modal_projector.b", "model.visual.c"):
        assert not list(MULTIMODAL.weights(name, (1,)))
        assert [own for own, _ in TensorNames().weights(name, (1,))] == [name]
    stray = {"language_model__model__layers__0__adapter__weight": torch.ones(2)}
    with pytest.raises(ConfigError, match=r"no place for language_model\..*adapter\.weight"):
        load(spoilt(checkpoints, "mistral3", tmp_path, **stray))


def test_a_head_that_is_there_is_used(checkpoints: Path, tmp_path: Path) -> None:
    """config.json of multi-modal checkpoints seldom says whether the head is the embedding."""
    folder = spoilt(checkpoints, "mistral3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not load_spec(folder).tie_embeddings
    tensors = load_file(folder / "model.safetensors")
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert load_spec(folder).tie_embeddings
    (folder / "model.safetensors").unlink()
    assert load_spec(folder).tie_embeddings


def test_norms_of_outputs_are_not_norms_of_inputs(checkpoints: Path, tmp_path: Path) -> None:
    norm = {"model__layers__0__input_layernorm__weight": torch.ones(64)}
    with pytest.raises(ConfigError, match=r"no place for .*input_layernorm"):
        load(spoilt(checkpoints, "olmo2", tmp_path, **norm))


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_of_the_layers_alone(checkpoints: Path, tmp_path: Path, tied: bool) -> None:
    """As embedding models are: one generates only if its embedding is also its head."""
    tensors = load_file(checkpoints / "olmo2" / "model.safetensors")
    body = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name != "lm_head.weight"
    }
    config = json.loads((checkpoints / "olmo2" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    save_file(body, tmp_path / "model.safetensors")
    spec = load_spec(tmp_path)
    assert (spec.tie_embeddings, spec.generates) == (True, tied)
    weights = dict(load(tmp_path).named_parameters())
    for name, parameter in load(checkpoints / "olmo2").named_parameters():
        assert name.startswith("lm_head") or torch.equal(parameter, weights[name]), name
