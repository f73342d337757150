"""What is refused before anything is started."""

from __future__ import annotations

import json
import math
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.attention.base import LayerHeads
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.experts_spec import ExpertsSpec, RoutingRule, SharedExpert
from minisgl_backend.host_memory import HostMemory
from minisgl_backend.model_check import (
    check_invariant_spec,
    checked_spec,
    num_adapted,
    state_dtype_name,
)
from minisgl_backend.models.attention_spec import AttentionGates, ScoresSpec
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.checkpoint import tensor_files
from minisgl_backend.models.latent_spec import LatentSpec
from minisgl_backend.models.norms_spec import NormsSpec
from minisgl_backend.models.spec import MoeSpec
from minisgl_backend.precheck import check_meeting_point, check_options, device_type
from minisgl_backend.weight_format import CONVERT_TO_FP8
from minisgl_bench.dummy_model import SHAPES
from minisgl_kit.adapters import adapted_shapes
from tests.conformance.checkpoints import write_checkpoint
from tests.unit.models.config_jsons import FALCON_H1_0_5B, LAGUNA_XS_2, LFM3_1_7B


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model for tests to spoil."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


def test_it_needs_no_torch() -> None:
    code = "import sys, minisgl_backend.cli.serve; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_device_is_known_where_it_is_named() -> None:
    assert device_type(EngineOptions(device="cpu")) == "cpu"


@pytest.mark.parametrize(
    ("given", "device", "message"),
    [
        (
            {"speculative_tokens": 2, "max_prefill_tokens": 3},
            None,
            "speculative_tokens=2 needs max_prefill_tokens of at least 4",
        ),
        (
            {"speculative_mtp_model": "a/layer", "speculative_tokens": 2},
            None,
            "option speculative_mtp_model needs speculative_mtp_tokens of at least 1",
        ),
        (
            {"speculative_max_requests": 4},
            None,
            "speculative_max_requests=4 needs speculative_tokens or speculative_mtp_tokens of at",
        ),
        (
            {"speculative_recent_tokens": 5},
            None,
            "speculative_recent_tokens=5 needs speculative_tokens of at least 1",
        ),
        (
            {"speculative_recent_tokens": 5, "speculative_mtp_tokens": 1},
            None,
            "speculative_recent_tokens=5 needs speculative_tokens of at least 1",
        ),
        ({"comm": "gloo"}, None, "comm is for tensor_parallel_size of 2 and more"),
        (
            {"distributed_timeout_s": 5.0},
            None,
            "distributed_timeout_s is for tensor_parallel_size of 2 and more",
        ),
        ({"expert_parallel": True}, None, "expert_parallel is for tensor_parallel_size of 2"),
        ({"rendezvous": "a:1"}, None, "rendezvous is for tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "rendezvous": "a"}, None, "must be HOST:PORT"),
        ({"tensor_parallel_size": 2, "comm": "nccl"}, "cpu", "comm=nccl does not work on cpu"),
        ({"tensor_parallel_size": 2, "comm": "gloo"}, "cuda", "comm=gloo does not work on cuda"),
        ({"moe_backend": "fused"}, "cpu", "moe_backend=fused needs a GPU"),
        ({"cuda_graph_batch_sizes": "1,2"}, "cpu", "cuda_graph_batch_sizes=1,2 needs a GPU"),
        ({"cuda_graph_max_tokens": 8}, "cpu", "cuda_graph_max_tokens=8 needs a GPU"),
        ({"dtype": "float64"}, "cuda", "dtype=float64 is for CPUs"),
        (
            {"attention_backend": "flashh"},
            "cuda",
            "attention_backend 'flashh' is not offered on a GPU; offered are cuda, triton, fa, ",
        ),
        ({"attention_backend": "trtllm,fa"}, "cuda", "attention_backend trtllm only decodes"),
        (
            {"cuda_graph_max_tokens": 64, "cuda_graph_max_batch_size": 0},
            "cuda",
            "cuda_graph_max_tokens=64 does not go with cuda_graph_max_batch_size=0",
        ),
        (
            {"cuda_graph_batch_sizes": "1,2", "cuda_graph_max_batch_size": 0},
            "cuda",
            "cuda_graph_batch_sizes=1,2 does not go with cuda_graph_max_batch_size=0",
        ),
        ({"cuda_graph_batch_sizes": "a,b"}, "cuda", "must be numbers of 1..256 as 1,2,4, got 'a"),
        ({"cuda_graph_batch_sizes": "1,900"}, "cuda", "must be numbers of 1..256 as 1,2,4, got"),
        (
            {"cuda_graph_batch_sizes": "1,9", "cuda_graph_max_batch_size": 8},
            "cuda",
            "must be numbers of 1..8 as 1,2,4, got '1,9'",
        ),
        (
            {"group_attention": True, "cache": "naive"},
            None,
            "group_attention=true needs cache=radix",
        ),
        (
            {"schedule_policy": "lpm", "cache": "naive"},
            None,
            "schedule_policy=lpm needs cache=radix",
        ),
        ({"state_snapshots": 2, "cache": "naive"}, None, "state_snapshots=2 needs cache=radix"),
        ({"host_cache_gib": 0.5, "cache": "naive"}, None, "host_cache_gib=0.5 needs cache=radix"),
        (
            {"host_cache_gib": 1e9},
            None,
            "host_cache_gib=1e[+]09 would take 1,073,741,824,000,000,0",
        ),
        ({"max_overtaken": 5, "cache": "naive"}, None, "max_overtaken=5 needs cache=radix"),
        ({"max_loras": 4}, None, "max_loras needs enable_lora"),
        ({"max_lora_rank": 32}, None, "max_lora_rank needs enable_lora"),
        ({"moe_backend": "torch"}, "cuda", "moe_backend=torch on a GPU needs cuda_graph"),
        ({"batch_invariant": True}, "cpu", "batch_invariant=True needs a GPU"),
        *(
            ({"batch_invariant": True, **other}, "cuda", f"batch_invariant does not go with {name}")
            for other, name in (
                ({"dtype": "float16"}, "dtype=float16"),
                ({"quantization": "fp8"}, "quantization=fp8"),
                ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
                ({"attention_backend": "triton"}, "attention_backend=triton"),
                ({"group_attention": True}, "group_attention=True"),
                ({"enable_lora": True}, "enable_lora=True"),
                (
                    {"moe_backend": "torch", "cuda_graph_max_batch_size": 0},
                    "moe_backend=torch",
                ),
            )
        ),
    ],
)
def test_options(given: dict[str, Any], device: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(EngineOptions(**given), device)


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_tokens": 2, "speculative_max_requests": 4, "speculative_recent_tokens": 5},
        {"speculative_mtp_tokens": 2, "speculative_max_requests": 4},
        {"speculative_recent_tokens": 0},
        {"tensor_parallel_size": 2, "distributed_timeout_s": 5.0},
    ],
)
def test_options_that_have_what_they_need(given: dict[str, Any]) -> None:
    check_options(EngineOptions(**given), "cpu")


def test_each_replica_may_be_batch_invariant() -> None:
    check_options(EngineOptions(batch_invariant=True, data_parallel_size=2), "cuda")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("192.0.2.1:5555", "is not an address of this machine"),
        ("nowhere.invalid:5555", "cannot be used: there is no host of this name"),
        ("a..b:5555", "cannot be used: there is no host of this name"),
    ],
)
def test_ranks_meet_on_this_machine(address: str, message: str) -> None:
    options = EngineOptions(tensor_parallel_size=2, rendezvous=address)
    with pytest.raises(ConfigError, match=f"^rendezvous {address} {message}"):
        check_meeting_point(options)


def test_ranks_meet_at_a_port_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = EngineOptions(tensor_parallel_size=2, rendezvous=f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match="the port is taken"):
            check_meeting_point(options)
    check_meeting_point(options)
    check_meeting_point(replace(options, rendezvous=f"localhost:{port}"))


@pytest.mark.parametrize(
    "given",
    [
        {"moe_backend": "fused", "comm": "pynccl", "tensor_parallel_size": 2},
        {"moe_backend": "torch", "cuda_graph_max_batch_size": 0, "attention_backend": "fa"},
    ],
)
def test_options_that_only_a_gpu_can_judge(given: dict[str, Any]) -> None:
    options = EngineOptions(**given)
    check_options(options, None)
    check_options(options, "cuda")
    with pytest.raises(ConfigError):
        check_options(options, "cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 3}, "cannot be split evenly over 3"),
        ({"moe_backend": "torch"}, "moe_backend: Qwen3ForCausalLM has no experts"),
        ({"state_snapshots": 2}, "state_snapshots: Qwen3ForCausalLM has no recurrent layers"),
        ({"state_dtype": "float16"}, "state_dtype: Qwen3ForCausalLM has no recurrent layers"),
        ({"max_sequence_length": 8193}, "8193 exceeds the model's context of 8192"),
        ({"num_pages": 10**10}, r"num_pages=10000000000 of 16 positions would take 655,360,00\S+ "),
        *(
            ({"num_pages": 10**10, "kv_cache_dtype": name}, r"positions would take 163,840,00\S+ ")
            for name in ("fp8_e4m3", "fp8")
        ),
        ({"num_pages": 10**8, "page_size": 1024}, "num_pages=100000000 of 1024 positions would"),
    ],
)
def test_options_that_do_not_go_with_the_model(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_spec(EngineOptions(**given), Path(DEMO_MODEL), "cpu")
    if "num_pages" in given:  # what a GPU holds is not known here
        checked_spec(EngineOptions(**given), Path(DEMO_MODEL), "cuda")


def test_windows_in_all_layers_share_no_pages(folder: Path) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **mistral}))
    options = EngineOptions(load_format="dummy", group_attention=True, max_sequence_length=64)
    checked_spec(options, folder, "cpu")
    with pytest.raises(ConfigError, match="group_attention=true does not go with windows of 64 "):
        checked_spec(replace(options, max_sequence_length=65), folder, "cpu")


def test_main_memory_holds_the_prefixes_of_all_replicas(folder: Path) -> None:
    """Beside all else that is there on a CPU."""
    gib = HostMemory.now().total / 2**30
    options = EngineOptions(load_format="dummy", host_cache_gib=0.7 * gib)
    check_options(options, "cuda")
    checked_spec(options, folder, "cpu")
    two = replace(options, data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"host_cache_gib=.* bytes of main memory, and this proc"):
        check_options(two, "cuda")
    with pytest.raises(
        ConfigError, match=r"^host_cache_gib=\S+ would take .* this process may use"
    ):
        checked_spec(two, folder, "cpu")


def test_sections_begin_with_pages(folder: Path) -> None:
    llama4 = {"architectures": ["Llama4ForCausalLM"], "attention_chunk_size": 48}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **llama4}))
    given: dict[str, Any] = {"load_format": "dummy", "max_sequence_length": 100}
    checked_spec(EngineOptions(**given, page_size=16), folder, "cpu")
    with pytest.raises(ConfigError, match="page_size 32 must divide attention_chunk_size 48 of "):
        checked_spec(EngineOptions(**given, page_size=32), folder, "cpu")
    checked_spec(EngineOptions(**{**given, "max_sequence_length": 48}, page_size=32), folder, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "gelu"}, "gates by GELU"),
        ({"norms": NormsSpec(eps=1e-6, place="around")}, "norms of the outputs"),
        ({"qk_norm": "token"}, "norms over all heads"),
        ({"scores": ScoresSpec(sinks=True)}, "attention sinks"),
        (
            {"latent": LatentSpec(latent_dim=8, rope_dim=8, nope_dim=8, value_dim=8)},
            "latent attention",
        ),
        ({"heads_by_layer": (LayerHeads(4, 2, 64),) * 4}, "layers that differ in their heads"),
        ({"scaled_layers": True}, "layers with inputs of their own"),
        ({"attention_gates": AttentionGates()}, "gated attention"),
        ({"weights": CONVERT_TO_FP8}, "quantized weights"),
        ({"moe": {"routing": {"sigmoid": True}}}, "routers that compute in float32"),
        ({"moe": {"routing": {"corrected": True}}}, "routers that compute in float32"),
        ({"moe": {"biases": True}}, "routers with biases"),
        (
            {"moe": {"shared": SharedExpert(name="shared", intermediate_size=64)}},
            "experts that all tokens take",
        ),
    ],
)
def test_layers_whose_sums_would_depend_on_the_batch(changes: dict[str, Any], message: str) -> None:
    spec = load_spec(Path(DEMO_MODEL))
    check_invariant_spec(spec)
    if (of_experts := changes.get("moe")) is not None:
        routing = {"num_experts": 8, "top_k": 2, "normalize": True, **of_experts.pop("routing", {})}
        experts = ExpertsSpec(routing=RoutingRule(**routing), intermediate_size=64, **of_experts)
        changes = {"moe": MoeSpec(experts=experts, layers=frozenset({0}))}
    with pytest.raises(ConfigError, match=f"batch_invariant: there are no kernels for {message}"):
        check_invariant_spec(replace(spec, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2**18, "intermediate_size": 2**20}, "the weights, as config.json has th"),
        (
            {"max_position_embeddings": 2**27, "head_dim": 4096},
            "max_sequence_length=134217728, for tables of posi",
        ),
    ],
)
def test_a_model_that_no_memory_could_hold(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    """With dummy weights, only config.json says how many there are; no file does."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=f"^{message}.* would take [0-9,]+ bytes, and this proc"):
        checked_spec(EngineOptions(load_format="dummy"), folder, "cpu")


def test_snapshots_that_no_memory_could_hold(folder: Path) -> None:
    config = {**SHAPES["qwen3.6-27b"], "num_hidden_layers": 4, "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy", state_snapshots=10**8)
    inputs = 10**8 * 3 * 10_240 * 3 * 2  # of convolutions, in bfloat16
    num_bytes = 10**8 * 3 * 48 * 128 * 128 * 4
    for dtype, needed in ((None, num_bytes + inputs), ("float16", num_bytes // 2 + inputs)):
        message = f"^state_snapshots=100000000, of .* {needed:,} bytes, and this process"
        with pytest.raises(ConfigError, match=message):
            checked_spec(replace(options, state_dtype=dtype), folder, "cpu")
    checked_spec(replace(options, cache="naive"), folder, "cpu")


def test_states_that_are_only_inputs_of_convolutions(folder: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 96, "num_hidden_layers": 2}
    config: dict[str, Any] = {**sizes, "num_attention_heads": 8, "dtype": "float32"}
    config |= {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy")
    with pytest.raises(ConfigError, match=r"^option state_dtype: .* of Lfm2ForCausalLM are inputs"):
        checked_spec(replace(options, state_dtype="bfloat16"), folder, "cpu")
    needed = 10**9 * 1024 * 2 * 4
    with pytest.raises(ConfigError, match=f"state_snapshots=1000000000, of .* {needed:,} bytes"):
        checked_spec(replace(options, state_snapshots=10**9), folder, "cpu")


@pytest.mark.parametrize("of_model", ["float32", "float16"])
def test_the_option_decides_the_type_of_states(of_model: str) -> None:
    spec = parse_spec({**SHAPES["qwen3.6-27b"], "mamba_ssm_dtype": of_model})
    assert state_dtype_name(EngineOptions(), spec) == of_model
    assert state_dtype_name(EngineOptions(state_dtype="bfloat16"), spec) == "bfloat16"


def test_adapters_that_no_memory_could_hold(folder: Path) -> None:
    config = {**SHAPES["qwen3-0.6b"], "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy", max_loras=1024, max_lora_rank=512)
    checked_spec(replace(options, dtype="bfloat16"), folder, "cpu")
    with pytest.raises(ConfigError, match=r"^max_loras=1024 of rank 512 would .* and this process"):
        checked_spec(replace(options, enable_lora=True), folder, "cpu")


def test_adapters_do_not_go_with_multipliers_in_weights(folder: Path) -> None:
    config = {**FALCON_H1_0_5B, "vocab_size": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy")
    checked_spec(options, folder, "cpu")
    with pytest.raises(ConfigError, match="option enable_lora: FalconH1ForCausalLM has"):
        checked_spec(replace(options, enable_lora=True), folder, "cpu")


@pytest.mark.parametrize(
    "config",
    [
        *(SHAPES[name] for name in ("qwen3-14b", "qwen3-30b-a3b", "qwen3.6-27b")),
        *(SHAPES[name] for name in ("qwen3.6-35b-a3b", "nemotron-nano-9b")),
        *(SHAPES[name] for name in ("nemotron-3-nano-30b-a3b", "granite-4-h-7b-a1b")),
        *(LAGUNA_XS_2, LFM3_1_7B),
    ],
)
def test_the_memory_of_adapters_is_that_of_their_slots(config: dict[str, Any]) -> None:
    spec = parse_spec(config)
    assert num_adapted(spec) == sum(ins + outs for _, outs, ins in adapted_shapes(spec))


def test_every_rank_holds_all_latents(folder: Path) -> None:
    config = {**SHAPES["deepseek-v2-lite"], "vocab_size": 2048, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy", dtype="bfloat16", num_pages=10**9)
    for num_ranks in (1, 2):
        num_bytes = num_ranks * 10**9 * 16 * 2 * 576 * 2
        with pytest.raises(ConfigError, match=rf"^num_pages=1000000000 of .* {num_bytes:,} bytes"):
            checked_spec(replace(options, tensor_parallel_size=num_ranks), folder, "cpu")


def test_heads_of_mamba_must_split(folder: Path) -> None:
    config = {**SHAPES["nemotron-nano-9b"], "vocab_size": 2048, "num_attention_heads": 48}
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 6}))
    with pytest.raises(ConfigError, match="128 heads of Mamba in 8 groups cannot be split evenly"):
        checked_spec(EngineOptions(load_format="dummy", tensor_parallel_size=3), folder, "cpu")


def test_latents_take_no_adapters(folder: Path) -> None:
    config = {**SHAPES["deepseek-v2-lite"], "vocab_size": 2048, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    options = EngineOptions(load_format="dummy")
    checked_spec(options, folder, "cpu")
    with pytest.raises(ConfigError, match="enable_lora: adapters are not supported for latent att"):
        checked_spec(replace(options, enable_lora=True), folder, "cpu")


def test_latents_of_another_size(tmp_path: Path) -> None:
    write_checkpoint("deepseek-v3", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kv_lora_rank": 44}))
    message = r"kv_lora_rank \+ qk_rope_head_dim is 60, but model\..*kv_a_proj_with_mqa\.weight has"
    with pytest.raises(ConfigError, match=message):
        checked_spec(EngineOptions(), tmp_path, None)


@pytest.mark.parametrize("case", ["deepseek-v3", "deepseek-v2-lite"])
def test_the_weights_of_latents_are_counted(case: str, tmp_path: Path) -> None:
    write_checkpoint(case, tmp_path)
    stored = [
        header.shape
        for held in tensor_files(tmp_path).values()
        for header in held.values()
        if len(header.shape) >= 2
    ]
    assert load_spec(tmp_path).num_parameters == sum(math.prod(shape) for shape in stored)


def test_a_config_of_other_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 4096}))
    with pytest.raises(
        ConfigError, match=r"vocab_size is 4096, but model\.embed_tokens\.weight has"
    ):
        checked_spec(EngineOptions(), folder, None)
    assert checked_spec(EngineOptions(load_format="dummy"), folder, None).vocab_size == 4096


def test_the_number_of_parameters_is_that_of_the_weights() -> None:
    stored = [
        header.shape
        for held in tensor_files(Path(DEMO_MODEL)).values()
        for header in held.values()
        if len(header.shape) == 2
    ]
    assert load_spec(Path(DEMO_MODEL)).num_parameters == sum(a * b for a, b in stored)
