"""Strict loading: every tensor has a place, every place a tensor, and errors name them."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.weight_place import WeightPlace, collect_places
from minisgl_backend.models import weights
from minisgl_backend.models.build import KernelChoices, build_model, weight_bytes
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.progress import shown
from tests.conformance.checkpoints import write_checkpoint
from tests.fakes.ranks import LoneRank


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per case, each with one file."""
    root = tmp_path_factory.mktemp("checkpoints")
    for case in ("qwen3", "llama-biases", "qwen3-moe"):
        write_checkpoint(case, root / case)
    return root


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    """A tied Qwen3 checkpoint for tests to spoil."""
    return Path(shutil.copytree(checkpoints / "qwen3", tmp_path / "qwen3"))


def _build(folder: Path, *, group: Group | None = None, **options: Any) -> Decoder:
    return build_model(
        load_spec(folder),
        folder,
        dtype=options.pop("dtype", torch.float32),
        device=torch.device("cpu"),
        group=group or OneRank(),
        **options,
    )


def _places(model: Decoder) -> dict[str, WeightPlace]:
    """The places of a model with plain weights."""
    places = collect_places(model)
    plain = {name: place for name, place in places.items() if isinstance(place, WeightPlace)}
    assert len(plain) == len(places)
    return plain


def _rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) drop tensors; dots in names are written as double underscores."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("case", ["qwen3", "llama-biases", "qwen3-moe"])
def test_merged_weights_hold_the_checkpoints_tensors(checkpoints: Path, case: str) -> None:
    model = _build(checkpoints / case)
    places = _places(model)
    tensors = load_file(checkpoints / case / "model.safetensors")
    assert places.keys() == tensors.keys()
    for name, place in places.items():
        assert torch.equal(place.target, tensors[name].expand_as(place.target)), name
    qkv = model.get_parameter("model.layers.0.self_attn.qkv_proj.matrix.weight")
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(qkv, torch.cat(parts))


def test_a_sharded_checkpoint_is_the_same(checkpoints: Path, tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    whole, sharded = _build(checkpoints / "qwen3"), _build(tmp_path)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, sharded.get_parameter(name)), name


def test_packed_modules_find_their_weights_as_plain_attributes(checkpoints: Path) -> None:
    model = _build(checkpoints / "qwen3")
    model.pack()
    for module in model.modules():
        for name, found in [*module.named_parameters(recurse=False), *module.named_children()]:
            assert vars(module)[name] is found
    replaced = nn.Parameter(torch.ones(3), requires_grad=False)
    model.model.norm.weight = replaced
    assert model.model.norm.weight is replaced


def test_dtype_is_converted_while_loading(checkpoints: Path) -> None:
    model = _build(checkpoints / "qwen3", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    stored = load_file(checkpoints / "qwen3" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, stored.bfloat16())


def test_a_missing_tensor_is_named(folder: Path) -> None:
    _rewrite(folder, model__layers__1__self_attn__k_norm__weight=None)
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.self_attn\.k_norm\.weight"):
        _build(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks .* and 20 more tensors"):
        _build(folder)


def test_a_left_over_tensor_is_named(folder: Path) -> None:
    _rewrite(folder, model__layers__2__mlp__up_proj__weight=torch.zeros(2))
    with pytest.raises(ConfigError, match=r"no place for model\.layers\.2\.mlp\.up_proj\.weight"):
        _build(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    _rewrite(folder, model__norm__weight=torch.zeros(65))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has the shape \(65,\).*\(64,\)"):
        _build(folder)


def test_a_bias_that_the_config_denies_is_left_over(folder: Path) -> None:
    bias = torch.zeros(128)
    bias[77] = 1e-3
    _rewrite(folder, model__layers__0__self_attn__q_proj__bias=bias)
    with pytest.raises(ConfigError, match=r"no place for .*q_proj\.bias"):
        _build(folder)


def test_a_bias_of_zeros_needs_no_place(folder: Path) -> None:
    """Tools that write GPTQ checkpoints give every projection one."""
    _rewrite(folder, model__layers__0__mlp__down_proj__bias=torch.zeros(64))
    _build(folder)


def test_a_copy_of_the_embedding_and_rotary_buffers_are_ignored(folder: Path) -> None:
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite(
        folder,
        lm_head__weight=embedding,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(16),
    )
    model = _build(folder)
    assert not hasattr(model, "lm_head")
    assert model.get_parameter("model.embed_tokens.matrix.weight").any()


@pytest.mark.parametrize("in_shards", [False, True])
def test_a_head_that_is_not_the_embedding_is_used(folder: Path, in_shards: bool) -> None:
    """Whatever config.json says: training may have changed the head alone."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    if in_shards:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        save_file({"lm_head.weight": head}, folder / "b.safetensors")
        located = {**dict.fromkeys(tensors, "a.safetensors"), "lm_head.weight": "b.safetensors"}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": located}))
    else:
        _rewrite(folder, lm_head__weight=head)
    model = _build(folder)
    assert torch.equal(model.get_parameter("lm_head.matrix.weight"), head)


def test_a_tied_head_may_stand_for_the_embedding(folder: Path) -> None:
    """Of tensors that share memory, safetensors' ``save_model`` keeps the first by name."""
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite(folder, model__embed_tokens__weight=None, lm_head__weight=embedding)
    model = _build(folder)
    assert not hasattr(model, "lm_head")
    assert torch.equal(model.get_parameter("model.embed_tokens.matrix.weight"), embedding)


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight"):
        _build(folder)


@pytest.mark.parametrize("size", [0, 4, 100, -8])
def test_truncated_files(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a whole safetensors file"):
        _build(folder)


def test_a_garbled_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        _build(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_git_lfs_has_not_fetched(folder: Path, name: str) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (folder / name).write_text(pointer)
    with pytest.raises(ConfigError, match=rf"{name} .*points to a file that Git LFS has not fetch"):
        _build(folder)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ConfigError, match="only safetensors are read"):
        _build(folder)


def test_gguf_files_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.Q4_K_M.gguf")
    with pytest.raises(ConfigError, match="holds GGUF files, which are not supported"):
        _build(folder)


def test_weights_by_mistrals_own_names_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(
        ConfigError, match=r"Mistral's own names \(consolidated\.safetensors\) only"
    ):
        _build(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds neither"):
        _build(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ({"model.norm.weight": "../model.safetensors"}, "puts model.norm.weight into"),
        ({"model.norm.weight": 7}, "puts model.norm.weight into 7"),
    ],
)
def test_a_broken_index(folder: Path, weight_map: Any, message: str) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        _build(folder)


@pytest.mark.parametrize("missing", ["file", "tensor"])
def test_an_index_that_promises_too_much(folder: Path, missing: str) -> None:
    names = list(load_file(folder / "model.safetensors"))
    if missing == "tensor":
        _rewrite(folder, model__norm__weight=None)
    shard = "another" if missing == "file" else "shard"
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    index = {"weight_map": dict.fromkeys(names, f"{shard}.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = (
        "does not exist" if missing == "file" else r"lacks model\.norm\.weight, which the index"
    )
    with pytest.raises(ConfigError, match=message):
        _build(folder)


@pytest.mark.parametrize("is_tied", [True, False])
def test_dummy_weights_need_no_files_that_an_index_names(folder: Path, is_tied: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": is_tied}))
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _build(folder, load_format="dummy")
    with pytest.raises(ConfigError, match=r"model-00001-of-00002\.safetensors.*does not exist"):
        _build(folder)


def test_dummy_weights_need_no_files_and_follow_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, again, other = (_build(folder, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    for name, parameter in first.named_parameters():
        assert parameter.isfinite().all() and parameter.any(), name
        assert torch.equal(parameter, again.get_parameter(name))
        assert "norm" in name or not torch.equal(parameter, other.get_parameter(name))
    with pytest.raises(ConfigError, match="load_format must be auto or dummy"):
        _build(folder, load_format="pickle")


@pytest.mark.parametrize(
    "case", ["gemma3", "gemma4-experts", "cohere-biases", "deepseek-v32", "kimi-linear", "bamba"]
)
def test_norms_and_scales_of_dummy_weights_have_no_effect(tmp_path: Path, case: str) -> None:
    write_checkpoint(case, tmp_path)
    model = _build(tmp_path, load_format="dummy")
    seen = 0
    for name, place in _places(model).items():
        if re.search(r"norm|_scale|scalar|router\.scale", name):
            seen += 1
            expected = 0.0 if name.endswith("bias") else place.scale
            assert torch.equal(place.target, torch.full_like(place.target, expected)), name
    assert seen > len(model.layers)


def test_an_mlp_that_is_an_expert_too_counts_once(tmp_path: Path) -> None:
    """The expert that all tokens take is also the last one in memory, if it has the same shape."""
    write_checkpoint("qwen2-moe", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["shared_expert_intermediate_size"] = values["moe_intermediate_size"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    apart, within = (
        _build(
            tmp_path,
            load_format="dummy",
            kernels=KernelChoices(fused_experts=fused),
        )
        for fused in (False, True)
    )
    assert sum(one.nbytes for one in apart.parameters()) == weight_bytes(apart)
    assert sum(one.nbytes for one in within.parameters()) > weight_bytes(within)
    assert weight_bytes(within) == weight_bytes(apart)


def test_progress_is_a_bar_on_a_terminal_and_a_log_line_elsewhere(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caplog.at_level(logging.INFO):
        _build(folder, progress=shown)
    assert "loading weights: 24" in caplog.text and "loaded 24 tensors" in caplog.text
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _build(folder, progress=shown)
    assert "loading weights" in capsys.readouterr().err
    _build(folder)  # as on ranks other than 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("case", ["qwen3", "llama-biases", "qwen3-moe"])
def test_two_ranks_hold_each_tensor_once(checkpoints: Path, case: str) -> None:
    """Split tensors add up to the whole; the other tensors are equal on both ranks."""
    first, second = (_places(_build(checkpoints / case, group=LoneRank(r, 2))) for r in (0, 1))
    for name, tensor in load_file(checkpoints / case / "model.safetensors").items():
        mine, theirs = first[name], second[name]
        if mine.dim is None:
            assert torch.equal(mine.target, tensor.expand_as(mine.target)), name
            assert torch.equal(mine.target, theirs.target), name
        else:
            assert torch.equal(torch.cat([mine.target, theirs.target], dim=mine.dim), tensor), name


class _Slice:
    """A tensor in a file; ``num_read`` counts the numbers that are read from all of them."""

    num_read = 0

    def __init__(self, stored: Any):
        self._stored = stored
        self.get_shape = stored.get_shape

    def __getitem__(self, region: Any) -> Tensor:
        found: Tensor = self._stored[region]
        _Slice.num_read += found.numel()
        return found


def test_a_rank_reads_its_slices_only(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its half of the matrices, and all of the norms and the router."""
    opened = weights.open_tensors

    @contextmanager
    def watched(path: Path) -> Iterator[Any]:
        with opened(path) as file:
            yield SimpleNamespace(
                keys=file.keys, get_slice=lambda name: _Slice(file.get_slice(name))
            )

    monkeypatch.setattr(weights, "open_tensors", watched)
    monkeypatch.setattr(_Slice, "num_read", 0)
    model = _build(checkpoints / "qwen3-moe", group=LoneRank(1, 2))
    assert _Slice.num_read == sum(
        math.prod(place.shape) if place.dim is None else place.target.numel()
        for place in _places(model).values()
    )


def test_ranks_beyond_the_heads_hold_the_same_keys(checkpoints: Path) -> None:
    """Four ranks over two key-value heads: two neighbours hold each head."""
    ranks = [_places(_build(checkpoints / "qwen3", group=LoneRank(r, 4))) for r in range(4)]
    stored = load_file(checkpoints / "qwen3" / "model.safetensors")
    for name in ("k_proj", "v_proj"):
        full = f"model.layers.0.self_attn.{name}.weight"
        held = [rank[full].target for rank in ranks]
        assert torch.equal(held[0], held[1])
        assert torch.equal(held[2], held[3])
        assert torch.equal(torch.cat([held[0], held[2]]), stored[full])


@pytest.mark.parametrize("case", ["qwen3", "llama-biases", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_of_ranks_are_slices_of_one_model(
    checkpoints: Path, case: str, dtype: torch.dtype
) -> None:
    def places(group: Group) -> dict[str, WeightPlace]:
        model = _build(checkpoints / case, group=group, load_format="dummy", seed=3, dtype=dtype)
        return _places(model)

    whole = places(OneRank())
    size = 4 if case == "qwen3" else 2  # four ranks over two key-value heads
    for rank in range(size):
        for name, mine in places(LoneRank(rank, size)).items():
            tensor = whole[name].target
            if mine.dim is not None:
                tensor = tensor.narrow(mine.dim, mine.start, mine.target.shape[mine.dim])
            elif tensor.dim() > 1:  # a norm of heads: one line per head of the rank
                tensor = tensor[: len(mine.target)]
            assert torch.equal(mine.target, tensor), name


def test_what_cannot_be_split_is_refused(checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 key-value heads cannot be split evenly over 3"):
        _build(checkpoints / "qwen3", group=LoneRank(0, 3))
