"""What a config.json means, and which ones are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.catalog import load_spec, parse_spec
from minisgl_backend.models.common_fields import read_rope
from minisgl_backend.models.config_json import ConfigReader, read_json
from minisgl_backend.models.recommended_sampling import recommended_sampling
from tests.unit.models.config_jsons import (
    LLAMA_3_1_8B,
    QWEN_3_0_6B,
)


@pytest.mark.parametrize("dtype_key", ["dtype", "torch_dtype"])
def test_dtype_has_two_spellings(dtype_key: str) -> None:
    values = {key: value for key, value in QWEN_3_0_6B.items() if key != "torch_dtype"}
    assert parse_spec(values).dtype == "float32"
    assert parse_spec({**values, dtype_key: "float16"}).dtype == "float16"


def test_yarn_by_its_ratio() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 10240}
    spec = parse_spec({**QWEN_3_0_6B, "rope_parameters": rope}).rope
    assert spec.factor == 4.0
    assert spec.attention_factor == pytest.approx(1.1386294)
    unstretched = {**rope, "original_max_position_embeddings": 40960}
    assert parse_spec({**QWEN_3_0_6B, "rope_parameters": unstretched}).rope.attention_factor == 1.0


def test_a_rotation_may_be_spelled_in_both_ways() -> None:
    former = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    given = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
    spec = parse_spec({**QWEN_3_0_6B, "rope_scaling": former, "rope_parameters": given}).rope
    assert (spec.scaling, spec.theta, spec.original_max_positions) == ("yarn", 5e5, 32768)


def test_an_original_context_beside_the_table_wins() -> None:
    values = {**LLAMA_3_1_8B, "original_max_position_embeddings": 4096}
    assert parse_spec(values).rope.original_max_positions == 4096


REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "architecture": (
        {"architectures": ["BloomForCausalLM"]},
        "BloomForCausalLM is not supported; supported are LlamaForCausalLM, .*Qwen3MoeForCausalLM",
    ),
    "empty architecture": ({"architectures": [""]}, "architectures must be a list of names"),
    "no architecture": ({"architectures": None}, "no architecture is not supported"),
    "remote code": ({"auto_map": {"AutoModel": "x.Y"}}, "its own code"),
    "quantized": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        r"quantized by bitsandbytes are not supported; supported are fp8",
    ),
    "tokens that see later ones": ({"is_causal": False}, "is_causal false is not supported"),
    "layers that differ": (
        {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}},
        "config.json: per_layer_config is not supported for Qwen3ForCausalLM",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "rope type": ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rope factor missing": ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    "rope factor": ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor must be positive"),
    "two rotations": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"type": "yarn", "factor": 4.0},
        },
        "rope_type is 'yarn' in rope_scaling and 'default' in rope_parameters; leave only one",
    ),
    "two rotations, one of them under an older key": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {"type": "yarn", "rope_type": None, "factor": 4.0},
        },
        "rope_type is 'yarn' in rope_scaling and 'default' in rope_parameters; leave only one",
    ),
    "two thetas": (
        {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_theta": 1e4}},
        "rope_theta is 10000.0 in rope_scaling and 1000000.0 in rope_parameters",
    ),
    "rotations by kind of layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0}}},
        "rope_parameters: a table for full_attention is not supported: this architecture has one",
    ),
    "yarn without any sign of how far": (
        {"rope_scaling": {"rope_type": "yarn"}},
        "rope_scaling: factor is missing",
    ),
    "rope table": ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
    "dtype": ({"torch_dtype": "int8"}, "dtype must be one of"),
    "missing": ({"vocab_size": None}, "vocab_size is missing"),
    "string": ({"vocab_size": "many"}, "vocab_size must be an integer"),
    "bool": ({"vocab_size": True}, "vocab_size must be an integer"),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1"),
    "number": ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    "infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be positive and finite"),
    "beyond floats": ({"rms_norm_eps": 10**400}, "rms_norm_eps must be positive and finite"),
    "rope theta beyond floats": ({"rope_theta": 10**400}, "rope_theta must be positive and finite"),
    "flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "word": ({"hidden_act": 7}, "hidden_act must be a string"),
    "eos": ({"eos_token_id": [1, -2]}, "eos_token_id"),
    "heads": ({"num_key_value_heads": 3}, "16 attention heads cannot share 3"),
    "too many layers": ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 1024, "),
    "too many positions": (
        {"max_position_embeddings": 10**11},
        "max_position_embeddings must be at most 134217728, got 100000000000",
    ),
    "stretched too far": (
        {"rope_scaling": {"type": "linear", "factor": 1e5}},
        "max_position_embeddings 40960 with a rotary factor of 100000 makes 4,096,000,000 posit",
    ),
    "stretched beyond numbers": (
        {"rope_scaling": {"type": "linear", "factor": 1e308}},
        "factor must be at most 1.34218e.08, got 1e.308",
    ),
    "too many tokens": ({"vocab_size": 10**9}, "vocab_size must be at most 16777216, got 1000000"),
    "negative": ({"hidden_size": -1024}, "hidden_size must be an integer >= 1, got -1024"),
    "fraction": ({"hidden_size": 1024.0}, "hidden_size must be an integer >= 1, got 1024.0"),
    "uneven heads": (
        {"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 1000},
        r"hidden_size must be a multiple of num_attention_heads \(16\), got 1000",
    ),
    "a huge id": ({"eos_token_id": 2**70}, "eos_token_id must be an integer >= 0 or a list"),
    "a long string": ({"vocab_size": "9" * 5000}, r"got '9{76}\.\.\.$"),
    "theta": ({"rope_theta": 1.0}, "rope_theta must be above 1, got 1.0"),
    "llama3 factors": (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 5.0,
                "high_freq_factor": 4.0,
            }
        },
        r"low_freq_factor must be at most high_freq_factor \(4\), got 5.0",
    ),
    "architectures": ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list of na"),
    "no name": ({"architectures": [{}]}, "architectures must be a list of names"),
    "odd head": ({"head_dim": 65}, "even head_dim, got 65"),
    "narrow head": (
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "dynamic scaling needs 4 rotary dimensions or more, got 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        parse_spec({**QWEN_3_0_6B, **changes})


def test_eos_ids_of_both_files_are_united(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_0_6B))
    assert load_spec(tmp_path).eos_token_ids == {151645}
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [151645, 151643], "temperature": 0.6}))
    assert load_spec(tmp_path).eos_token_ids == {151645, 151643}
    generation.write_text(json.dumps({}))
    assert load_spec(tmp_path).eos_token_ids == {151645}


@pytest.mark.parametrize("eos", ["<end>", {"__type": "AddedToken", "content": "<end>"}])
def test_a_model_that_names_no_eos_id_ends_as_its_tokenizer_says(tmp_path: Path, eos: Any) -> None:
    added = [{"id": 1, "content": "<start>"}, {"id": 7, "content": "<end>"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_0_6B))
    assert load_spec(tmp_path).eos_token_ids == {151645}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_3_0_6B, "eos_token_id": None}))
    assert load_spec(tmp_path).eos_token_ids == {7}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_3_0_6B, "eos_token_id": 10**6}))
    assert load_spec(tmp_path).eos_token_ids == {7}  # no token has the other id
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert not load_spec(tmp_path).eos_token_ids
    other = tmp_path / "another tokenizer"
    other.mkdir()
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (other / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert load_spec(tmp_path, other).eos_token_ids == {7}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    (other / "tokenizer_config.json").unlink()  # then the model's own folder tells it
    assert load_spec(tmp_path, other).eos_token_ids == {7}


def test_sampling_that_a_checkpoint_recommends(tmp_path: Path) -> None:
    assert not recommended_sampling(tmp_path)
    advice = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "do_sample": True, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    assert recommended_sampling(tmp_path) == {"temperature": 0.6, "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps({**advice, "do_sample": False}))
    assert recommended_sampling(tmp_path)["temperature"] == 0


def test_eos_ids_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """A vocabulary was made smaller, and generation_config.json is still that of the larger one."""
    config = {**QWEN_3_0_6B, "vocab_size": 1000, "eos_token_id": [999, 1000]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_spec(tmp_path).eos_token_ids == {999}
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [7, 151643]}))
    assert load_spec(tmp_path).eos_token_ids == {7, 999}


@pytest.mark.parametrize(
    ("pooling", "reason"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, None),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, None),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": True}, "lasttoken.*cls_token"),
        ({"pooling_mode": "mean"}, "not by pooling_mode mean"),
    ],
)
def test_other_embeddings_than_of_the_last_token_are_refused(
    pooling: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3_0_6B))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if reason is not None:
        with pytest.raises(ConfigError, match=reason):
            load_spec(tmp_path)
        return
    assert load_spec(tmp_path).generates
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a projection of embeddings"):
        load_spec(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 10**5, '{"x": ' + "1" * 5000 + "}"])
def test_unreadable_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_spec(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read_json(tmp_path / "other.json")


def test_ranks_share_heads_evenly() -> None:
    spec = parse_spec(QWEN_3_0_6B)
    shape = spec.attention_shape(4)
    assert (shape.num_heads, shape.num_kv_heads, shape.num_layers) == (4, 2, 28)
    with pytest.raises(ConfigError, match=r"8 key-value heads .* 3 tensor-parallel ranks"):
        spec.attention_shape(3)


def test_null_is_absent_unless_it_means_none() -> None:
    config = ConfigReader({"window": None})
    assert config.integer("window", 5) == 5
    assert config.integer_or_null("window", 5) is None
    assert config.integer_or_null("other", 5) == 5


def test_reading_a_spec_needs_no_torch() -> None:
    """Building a model needs it, but not the packages that would take as long to import again."""
    code = (
        "import sys; from pathlib import Path; from minisgl_backend.config import DEMO_MODEL; "
        "from minisgl_backend.models import catalog, checkpoint; "
        "folder = Path(DEMO_MODEL); spec = catalog.load_spec(folder); "
        "assert 'torch' not in sys.modules; "
        "import torch; from minisgl_backend.models.build import build_model; "
        "from minisgl_backend.parallel.group import OneRank; "
        "options = {'dtype': torch.float32, 'device': torch.device('cpu'), 'group': OneRank()}; "
        "build_model(spec, folder, **options); "
        "assert not {'transformers', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 131072),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 4 * 131072),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 2 * 131072),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 8.0,
                "original_max_position_embeddings": 32768,
            },
            8 * 32768,
        ),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
        ),
    ],
)
def test_the_context_is_as_long_as_the_positions_are_stretched(
    rope: dict[str, object], context: int
) -> None:
    values = {k: v for k, v in LLAMA_3_1_8B.items() if not k.startswith("rope")}
    assert parse_spec({**values, "rope_parameters": rope}).context == context


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_errors_about_rope_name_the_spelling_that_is_there(key: str) -> None:
    config = ConfigReader({key: {"rope_type": "linear"}})
    with pytest.raises(ConfigError, match=f"config.json: {key}: factor is missing"):
        read_rope(config, 64)
