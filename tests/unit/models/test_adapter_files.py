"""Adapters in PEFT's format: what is read from them, and what is refused under which name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl_backend.adapter_options import adapter_paths, adapter_tasks, check_task_names
from minisgl_backend.build import build_engine
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.models.adapter_files import Projection, open_adapter
from minisgl_backend.models.attention_spec import AttentionGates
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.tensor_names import MULTIMODAL
from minisgl_backend.precheck import check_options
from minisgl_backend.server import options as server_options
from minisgl_backend.server.options import checked
from minisgl_kit.adapters import adapted_shapes, write_adapter
from tests.unit.models.config_jsons import LFM2_1_2B, LFM3_1_7B

SPEC = load_spec(Path(DEMO_MODEL))
LAYER = "base_model.model.model.layers.0.self_attn"
HIDDEN, QUERIES = SPEC.hidden_size, SPEC.heads.num_heads * SPEC.heads.head_dim
KEYS = SPEC.heads.num_kv_heads * SPEC.heads.head_dim


def projections() -> dict[str, Projection]:
    found = {}
    for layer in range(SPEC.num_layers):
        name = f"model.layers.{layer}"
        found[f"{name}.self_attn.q_proj"] = Projection(HIDDEN, QUERIES)
        found[f"{name}.self_attn.v_proj"] = Projection(HIDDEN, KEYS)
        found[f"{name}.mlp.down_proj"] = Projection(SPEC.intermediate_size, HIDDEN)
    return found


def written(folder: Path, **fields: Any) -> Path:
    given = {"targets": ("q_proj", "v_proj"), **fields}
    return write_adapter(folder, SPEC, rank=4, **given)


def refusal(folder: Path, *, max_rank: int = 16) -> str:
    with pytest.raises(ConfigError) as error:
        open_adapter(folder, projections(), SPEC.names, max_rank=max_rank)
    return str(error.value)


def changed(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The file with tensors replaced or added, or removed if they are None."""
    path = folder / "adapter_model.safetensors"
    held = load_file(path)
    for name, tensor in tensors.items():
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path)
    return folder


def test_factors_come_as_they_are_and_have_a_scaling(tmp_path: Path) -> None:
    file = open_adapter(written(tmp_path, lora_alpha=6), projections(), SPEC.names, max_rank=4)
    held = load_file(tmp_path / "adapter_model.safetensors")
    assert file.rank == 4
    for name, a, b in file.tensors():
        assert torch.equal(a, held[f"base_model.model.{name}.lora_A.weight"])
        assert torch.equal(b, held[f"base_model.model.{name}.lora_B.weight"])
        assert file.factors[name].scaling == 1.5
    assert len(file.factors) == 2 * SPEC.num_layers


@pytest.mark.parametrize(
    ("given", "base"), [("owner/name", "owner/name"), (None, ""), (5, ""), ("x" * 999, "x" * 200)]
)
def test_the_model_for_which_an_adapter_was_trained(given: Any, base: str, tmp_path: Path) -> None:
    folder = written(tmp_path, base_model_name_or_path=given)
    assert open_adapter(folder, projections(), SPEC.names, max_rank=4).base == base


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    folder = written(
        tmp_path,
        rank_pattern={"v_proj": 2},
        alpha_pattern={r"layers\.0\.self_attn\.q_proj": 40},
        use_rslora=True,
    )
    held = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in held if ".v_proj." in name]:
        held[name] = held[name][:2] if "lora_A" in name else held[name][:, :2].contiguous()
    save_file(held, folder / "adapter_model.safetensors")
    factors = open_adapter(folder, projections(), SPEC.names, max_rank=4).factors
    assert factors["model.layers.0.self_attn.q_proj"].scaling == 40 / 4**0.5
    assert factors["model.layers.1.self_attn.q_proj"].scaling == 8 / 4**0.5
    assert factors["model.layers.0.self_attn.v_proj"].rank == 2


@pytest.mark.parametrize(
    "target_modules",
    [r".*\.(q|v)_proj", ["self_attn.q_proj", "v_proj"], "all-linear"],
)
def test_targets_by_pattern_name_or_all(target_modules: Any, tmp_path: Path) -> None:
    known = {name: value for name, value in projections().items() if "down" not in name}
    folder = written(tmp_path, target_modules=target_modules)
    assert open_adapter(folder, known, SPEC.names, max_rank=4).factors.keys() == known.keys()


def test_some_layers_only(tmp_path: Path) -> None:
    folder = written(tmp_path, layers_to_transform=[1])
    path = folder / "adapter_model.safetensors"
    first = f"{LAYER}.q_proj.lora_A.weight"
    assert refusal(folder).startswith(f"{first} of the adapter is of no module")
    held = {name: tensor for name, tensor in load_file(path).items() if ".layers.1." in name}
    save_file(held, path)
    assert len(open_adapter(folder, projections(), SPEC.names, max_rank=4).factors) == 2


def test_the_pattern_of_layers_may_have_groups(tmp_path: Path) -> None:
    folder = written(tmp_path, layers_to_transform=[1], layers_pattern="(layers|(blocks))")
    assert refusal(folder).startswith(f"{LAYER}.q_proj.lora_A.weight of the adapter is of no mod")
    every = list(range(SPEC.num_layers))
    folder = written(tmp_path, layers_to_transform=every, layers_pattern="(layers|(blocks))")
    assert open_adapter(folder, projections(), SPEC.names, max_rank=4).factors


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"r": 0}, "r must"),
        ({"lora_alpha": "high"}, "lora_alpha"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": "["}, "target_modules"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "target_modules has lm_head"),
        ({"target_modules": ".*[qv]_proj|.*tokens"}, "target_modules has model.emb"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern"),
        ({"layers_to_transform": ["first"]}, "layers_to_transform"),
        ({"layers_pattern": 5}, "layers_pattern"),
        ({"layers_pattern": [None]}, "layers_pattern"),
        ({"use_rslora": "false"}, "use_rslora"),
        ({"rank_pattern": {"a)|(b": 4}}, "rank_pattern"),
        ({"an_option_of_tomorrow": 1}, "an_option_of_tomorrow"),
    ],
)
def test_fields_that_change_more_are_refused_by_name(
    fields: dict[str, Any], name: str, tmp_path: Path
) -> None:
    assert f"adapter_config.json: {name}" in refusal(written(tmp_path, **fields))


@pytest.mark.parametrize("start", [True, "gaussian", "orthogonal", "eva", "mica"])
def test_ways_to_start_that_leave_the_base_model_are_taken(start: Any, tmp_path: Path) -> None:
    folder = written(tmp_path, init_lora_weights=start, targets=("q_proj", "v_proj", "down_proj"))
    assert open_adapter(folder, projections(), SPEC.names, max_rank=4).factors


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x",
        r"(\w+\.?)+!",
        "(a|.a?)*x",
        "(([a-z])+.)+x",
        ".*" * 20 + "x",
        "(a.*|b)(.*.*.*c|.*d).*(.*e|f).*x",
        "|".join([".*a.*b"] * 16),
        "|".join([".*a.*b.*c.*d.*e"] * 32),
        ".?" * 40 + "#",
        "(?:.?){40}#",
        "(?:.|.)" * 40 + "#",
        "(?i:" + "(?:a|A)" * 40 + "#)",
        "(?:a|ab|abc|abcd)" * 20 + "#",
    ],
)
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_patterns_that_would_take_for_ever_are_refused(
    field: str, pattern: str, tmp_path: Path
) -> None:
    """They would block every thread of the engine's process."""
    value = {pattern: 4} if field == "rank_pattern" else pattern
    words = refusal(written(tmp_path, **{field: value}))
    assert words.startswith(f"adapter_config.json: {field} holds a pattern that may take forever")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
        r"(?!x$)(?:(?:.*?(?:vision|text).*?(?:self_attn|mlp).*?\.(?:q_proj|v_proj))"
        r"|(?:\bmodel\.layers\.[\d]{1,}(?!.*\.experts\.\d)\..*?(?:attn|mlp).*?\.(?:q_proj|v_proj)))"
        r"|(?:.*?\bvision_tower\.input_proj)",
        r"(?:.*?(?:vision|image|visual|patch|language|text).*?(?:self_attn|attention|attn|mlp|ffn)"
        r".*?(?:q_proj|k_proj|v_proj|qkv_proj|qkv|proj|fc1|fc2|linear).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
        r"^(?!.*visual).*\.(q_proj|v_proj)$",
        r"model\.layers\.([0-9]|1[0-9])\.self_attn\.[qv(*+]_proj",
    ],
)
def test_usual_patterns_are_taken(pattern: str, tmp_path: Path) -> None:
    known = {name: value for name, value in projections().items() if "down" not in name}
    folder = written(tmp_path, target_modules=pattern)
    assert open_adapter(folder, known, SPEC.names, max_rank=4).factors.keys() == known.keys()


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    a, b = f"{LAYER}.q_proj.lora_A.weight", f"{LAYER}.q_proj.lora_B.weight"
    a_again, b_again = (name.replace(".model.layers.", ".layers.") for name in (a, b))
    cases: list[tuple[dict[str, torch.Tensor | None], str]] = [
        ({a: None}, f"lacks {a}"),
        ({b: None}, f"lacks {b}"),
        ({a: None, b: None}, f"lacks {a}"),
        ({a: torch.zeros(4, HIDDEN + 1)}, f"{a} of the adapter has the shape"),
        ({b: torch.zeros(QUERIES, 5)}, f"{b} of the adapter has the shape"),
        ({a: torch.zeros(4, HIDDEN, dtype=torch.int32)}, f"{a} of the adapter has the type I32"),
        (
            {a_again: torch.zeros(4, HIDDEN), b_again: torch.zeros(QUERIES, 4)},
            "of the adapter are of one module",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, HIDDEN),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(9, 4),
            },
            "base_model.model.lm_head.lora_A.weight",
        ),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)},
            "lora_embedding_A of the adapter is not supported: embeddings",
        ),
        (
            {"base_model.model.lm_head.weight": torch.zeros(9, HIDDEN)},
            "lm_head.weight of the adapter is not supported: an adapter does not replace",
        ),
        (
            {f"{LAYER}.q_proj.lora_magnitude_vector": torch.zeros(QUERIES)},
            "lora_magnitude_vector of the adapter is not supported: it belongs to DoRA",
        ),
    ]
    for index, (tensors, words) in enumerate(cases):
        folder = changed(written(tmp_path / str(index)), **tensors)
        assert words in refusal(folder)
    assert "has the rank 4" in refusal(written(tmp_path / "high"), max_rank=3)


@pytest.mark.parametrize(
    ("config", "known"),
    [(LFM2_1_2B, "q_proj, out_proj, w1"), (LFM3_1_7B, "q_proj, gate_proj, o_proj, w1")],
)
def test_what_takes_adapters_is_named_as_in_the_checkpoint(
    config: dict[str, Any], known: str, tmp_path: Path
) -> None:
    spec = parse_spec(config)
    gates = ["self_attn.gate_proj"] * spec.gates_apart
    modules = ["self_attn.q_proj", *gates, "self_attn.o_proj", "mlp.gate_proj"]
    projections = {f"model.layers.2.{module}": Projection(8, 8) for module in modules}
    name = "base_model.model.model.layers.0.conv.out_proj"
    tensors = {f"{name}.lora_{factor}.weight": torch.zeros(4, 8) for factor in "AB"}
    folder = written(tmp_path, target_modules=["out_proj"])
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"takes adapters only for {known} of its layers"):
        open_adapter(folder, projections, spec.names, max_rank=4)


@pytest.mark.parametrize(
    ("config", "decoders", "theirs"),
    [
        (LFM2_1_2B, "mlp.gate_proj", "feed_forward.w1"),
        (LFM2_1_2B, "self_attn.o_proj", "self_attn.out_proj"),
        (LFM3_1_7B, "mlp.down_proj", "feed_forward.w2"),
        (LFM3_1_7B, "self_attn.gate_proj", "self_attn.g_proj"),  # as in transformers
        (LFM3_1_7B, "self_attn.gate_proj", "self_attn.gate_proj"),  # as in the checkpoint
    ],
)
def test_a_layer_that_the_file_lacks_is_named_as_the_others_are(
    config: dict[str, Any], decoders: str, theirs: str, tmp_path: Path
) -> None:
    spec = parse_spec(config)
    known = {f"model.layers.{layer}.{decoders}": Projection(8, 8) for layer in (2, 11)}
    file = "base_model.model.model.layers"
    folder = written(tmp_path, target_modules=[theirs.rpartition(".")[2]])
    for layers, lacking in (((2, 11), None), ((2,), 11), ((11,), 2)):
        tensors = {
            f"{file}.{layer}.{theirs}.lora_{factor}.weight": torch.zeros(4, 8)
            if factor == "A"
            else torch.zeros(8, 4)
            for layer in layers
            for factor in "AB"
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        if lacking is None:
            assert (
                open_adapter(folder, known, spec.names, max_rank=4).factors.keys() == known.keys()
            )
            continue
        missing = f"the adapter lacks {file}.{lacking}.{theirs}.lora_A.weight"
        with pytest.raises(ConfigError, match=f"{re.escape(missing)}$"):
            open_adapter(folder, known, spec.names, max_rank=4)


def test_adapters_for_tests_have_the_sizes_of_gates() -> None:
    """A gate of a head is one number, or as many as the head has elements."""
    of_heads = parse_spec(LFM3_1_7B)
    of_elements = replace(of_heads, attention_gates=AttentionGates(apart=True))
    heads = of_heads.heads
    for spec, size in (
        (of_heads, heads.num_heads),
        (of_elements, heads.num_heads * heads.head_dim),
    ):
        sizes = {outs for name, outs, _ in adapted_shapes(spec) if "self_attn.gate_proj" in name}
        assert sizes == {size}


def test_numbers_that_are_not_finite_are_named(tmp_path: Path) -> None:
    name = f"{LAYER}.v_proj.lora_B.weight"
    folder = changed(written(tmp_path), **{name: torch.full((KEYS, 4), float("nan"))})
    file = open_adapter(folder, projections(), SPEC.names, max_rank=4)
    assert file.complaint(torch.float32) == f"{name} of the adapter has numbers that are not finite"


def test_numbers_that_only_float32_could_hold_are_named(tmp_path: Path) -> None:
    """The scaling, 2, makes them too large."""
    name = f"{LAYER}.v_proj.lora_B.weight"
    folder = changed(written(tmp_path), **{name: torch.full((KEYS, 4), 4e4)})
    file = open_adapter(folder, projections(), SPEC.names, max_rank=4)
    assert name not in file.complaint(torch.bfloat16)
    said = file.complaint(torch.float16)
    assert said == f"{name} of the adapter has numbers that are too large for torch.float16"


def test_parts_that_the_model_leaves_out_are_refused(tmp_path: Path) -> None:
    """An adapter of a larger model may also apply to its vision part."""
    seen = "base_model.model.model.visual.blocks.0.attn.q_proj"
    tensors = {
        f"{seen}.lora_A.weight": torch.zeros(4, 8),
        f"{seen}.lora_B.weight": torch.zeros(8, 4),
    }
    folder = changed(written(tmp_path), **tensors)
    with pytest.raises(ConfigError, match=f"{seen}.lora_A.weight of the adapter is not supported"):
        open_adapter(folder, projections(), MULTIMODAL, max_rank=4)


def test_reading_an_adapter_again_and_again_leaves_nothing_behind(tmp_path: Path) -> None:
    file = open_adapter(written(tmp_path), projections(), SPEC.names, max_rank=4)

    def read(times: int) -> None:
        for _ in range(times):
            for _ in file.tensors():
                pass

    read(10)
    tracemalloc.start()
    try:
        read(10)
        before, _ = tracemalloc.get_traced_memory()
        read(500)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000  # bytes, from other threads; a leak of 28 per tensor is 112,000


def test_files_that_are_written_again_have_another_state(tmp_path: Path) -> None:
    def state() -> int:
        return open_adapter(tmp_path, projections(), SPEC.names, max_rank=4).state

    written(tmp_path)
    first = state()
    assert state() == first
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        path = tmp_path / name
        content, since_ns = path.read_bytes(), path.stat().st_mtime_ns
        path.write_bytes(content)
        os.utime(path, ns=(since_ns, since_ns + 1))
        assert state() != first
        os.utime(path, ns=(since_ns, since_ns))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "/file is not a folder" in refusal(tmp_path / "file")
    assert "cannot be read: File name too long" in refusal(tmp_path / ("n" * 300))
    folder = written(tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "pickled" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json does not exist" in refusal(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"{name} is no regular file" in refusal(folder)


def test_lists_of_adapters(tmp_path: Path) -> None:
    listed = tmp_path / "multi_lora.json"
    listed.write_text(json.dumps({"doll": "vicuna/doll", "sheep": "/loras/sheep"}))
    options = EngineOptions(
        enable_lora=True,
        multi_lora=str(listed),
        lora_modules="sheep=/other/sheep, cow=cow, pig=~/pig",
        lora_task_ids="1=doll,7=cow",
    )
    check_options(options, "cpu")
    check_task_names(options)
    assert adapter_paths(options) == {
        "doll": str(tmp_path / "vicuna/doll"),
        "sheep": "/other/sheep",
        "cow": "cow",
        "pig": str(Path.home() / "pig"),
    }
    assert adapter_tasks(options) == {1: "doll", 7: "cow"}
    unknown = replace(options, lora_task_ids="1=doll,8=hen")
    check_task_names(replace(unknown, lora_updates=True))  # it may come later
    known = r"\['doll', 'sheep', 'cow', 'pig'\]"
    with pytest.raises(ConfigError, match=f"8 stands for 'hen', and .* {known}"):
        check_task_names(unknown)
    with pytest.raises(ConfigError, match="lora_task_ids: 8 stands for 'hen'"):
        build_engine(unknown)


ASCII_ONLY = """
import json, sys
from minisgl_backend import LLM
from minisgl_backend.errors import MiniSGLError
assert sys.getfilesystemencoding() == "ascii"
listed, broken = json.loads(sys.stdin.buffer.read())
with LLM(enable_lora=True, lora_updates=True, multi_lora=listed, num_pages=8) as llm:
    told = list(llm.adapters())
    try:
        llm.load_adapter("broken", broken)
    except MiniSGLError as error:
        told.append(str(error))
print(json.dumps(told))
"""


def test_names_that_are_not_ascii_where_python_takes_them_for_ascii(tmp_path: Path) -> None:
    """As it does inside Triton's stub."""
    good, broken = written(tmp_path / "schön"), written(tmp_path / "schlïmm")
    (broken / "adapter_model.safetensors").unlink()
    listed = tmp_path / "größer.json"
    listed.write_text(json.dumps({"good": good.name}), "utf-8")
    outcome = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", ASCII_ONLY],
        input=json.dumps([str(listed), str(broken)]).encode(),
        stdout=subprocess.PIPE,
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        check=True,
    )
    name, error = json.loads(outcome.stdout)
    assert name == "good"
    assert f"{broken / 'adapter_model.safetensors'} does not exist" in error


def test_serve_refuses_a_task_of_an_unknown_adapter_before_it_starts_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also knows the adapters that the engine will find in the model repository."""
    beside = tmp_path / "llm_engine" / "1" / "multi_lora.json"
    beside.parent.mkdir(parents=True)
    beside.write_text(json.dumps({"doll": str(written(tmp_path))}))
    monkeypatch.setattr(server_options, "shipped_repository", lambda: tmp_path)
    options = EngineOptions(enable_lora=True, lora_task_ids="1=doll")
    assert checked(options).multi_lora == str(beside)
    with pytest.raises(ConfigError, match=r"8 stands for 'hen', and .* \['doll'\]"):
        checked(replace(options, lora_task_ids="1=doll,8=hen"))


def test_a_folder_without_a_config_is_found_before_a_server_starts(tmp_path: Path) -> None:
    options = EngineOptions(enable_lora=True, lora_modules=f"empty={tmp_path}")
    with pytest.raises(ConfigError, match=r"'empty': .*/adapter_config.json does not exist"):
        checked(options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_modules": "a=b"}, "lora_modules needs enable_lora"),
        ({"lora_updates": True}, "lora_updates needs enable_lora"),
        ({"enable_lora": True, "lora_modules": "a"}, "lora_modules must be"),
        ({"enable_lora": True, "lora_modules": "a=b,c=d, a=e"}, "lora_modules names 'a' twice"),
        ({"enable_lora": True, "lora_task_ids": "a=b"}, "lora_task_ids must be"),
        ({"enable_lora": True, "lora_task_ids": "1=b,01=c"}, "lora_task_ids has 1 twice"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras 2 must be"),
        ({"enable_lora": True, "multi_lora": "/nowhere.json"}, "/nowhere.json does not exist"),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_options(EngineOptions(**given), "cpu")
