"""The models' config.pbtxt, the wire's table, and the client's names agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from minisgl_client import wire as client
from tritonclient.grpc import model_config_pb2

from minisgl_backend.wire.entries import Tensor
from minisgl_backend.wire.parameters import (
    BY_NAME,
    CHUNK,
    INPUT_IDS,
    INPUTS,
    LOOKUPS,
    LORA_ADAPTERS,
    LORA_ORDER,
    NEUTRAL,
    OUTPUT_IDS,
    OUTPUTS,
    REQUEST,
)

REPOSITORY = Path(__file__).parents[2] / "model_repository"
MODELS = ("tokenizer", "llm_engine", "detokenizer")
ENSEMBLES = ("minisgl", "minisgl_batched")
# for the ensembles and the text models, and for llm_engine when a client calls it alone
TEXT_INPUTS = tuple(tensor for entry in INPUTS for tensor in entry.tensors)
TEXT_OUTPUTS = tuple(entry.tensor for entry in OUTPUTS)
TOKEN_INPUTS = tuple(tensor for entry in INPUTS if not entry.text_only for tensor in entry.tensors)
TOKEN_OUTPUTS = tuple(entry.tensor for entry in OUTPUTS if not entry.text_only)


def config(model: str) -> Any:
    text = (REPOSITORY / model / "config.pbtxt").read_text("utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def declared(tensors: Sequence[Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Data type and dims by name."""
    types = model_config_pb2.DataType
    found = {tensor.name: (types.Name(tensor.data_type), tuple(tensor.dims)) for tensor in tensors}
    assert len(found) == len(tensors)
    return found


def table(tensors: Iterable[Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {tensor.name: (tensor.data_type, tensor.dims) for tensor in tensors}


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        ("tokenizer", TEXT_INPUTS, (INPUT_IDS, REQUEST, *LOOKUPS)),
        (
            "llm_engine",
            (REQUEST, LORA_ORDER, *TOKEN_INPUTS),
            (OUTPUT_IDS, CHUNK, LORA_ADAPTERS, *TOKEN_OUTPUTS),
        ),
        ("detokenizer", (CHUNK,), TEXT_OUTPUTS),
        ("minisgl", TEXT_INPUTS, TEXT_OUTPUTS),
        ("minisgl_batched", TEXT_INPUTS, TEXT_OUTPUTS),
    ],
)
def test_models_declare_what_the_table_says(
    model: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> None:
    assert declared(config(model).input) == table(inputs)
    assert declared(config(model).output) == table(outputs)


@pytest.mark.parametrize("model", [*MODELS, *ENSEMBLES])
def test_every_model_has_its_name_and_a_version(model: str) -> None:
    assert config(model).name == model
    assert (REPOSITORY / model / "1").is_dir()
    assert any((REPOSITORY / model / "1").iterdir()), "git does not keep an empty folder"


@pytest.mark.parametrize("model", MODELS)
def test_models_are_decoupled_and_need_no_gpu(model: str) -> None:
    loaded = config(model)
    assert loaded.backend == "python"
    assert loaded.max_batch_size == 0
    assert loaded.model_transaction_policy.decoupled
    (group,) = loaded.instance_group
    assert (group.count, group.kind) == (1, model_config_pb2.ModelInstanceGroup.KIND_CPU)


@pytest.mark.parametrize("model", ["tokenizer", "llm_engine", *ENSEMBLES])
def test_all_inputs_of_a_request_are_optional(model: str) -> None:
    assert all(tensor.optional for tensor in config(model).input)


def test_chunks_keep_their_order() -> None:
    loaded = config("detokenizer")
    assert not loaded.HasField("dynamic_batching")
    assert not any(tensor.optional for tensor in loaded.input)


@pytest.mark.parametrize(("model", "max_batch_size"), [("minisgl", 0), ("minisgl_batched", 1)])
def test_ensembles_differ_in_shape_only(model: str, max_batch_size: int) -> None:
    loaded = config(model)
    assert loaded.max_batch_size == max_batch_size
    for tensor in (*loaded.input, *loaded.output):
        reshaped = max_batch_size == 1 and tensor.dims[0] == 1
        assert tensor.HasField("reshape") == reshaped
        assert not tensor.reshape.shape


@pytest.mark.parametrize("model", ENSEMBLES)
def test_ensembles_pass_everything_on(model: str) -> None:
    steps = {step.model_name: step for step in config(model).ensemble_scheduling.step}
    same_in = {tensor.name: tensor.name for tensor in TEXT_INPUTS}
    same_out = {tensor.name: tensor.name for tensor in TEXT_OUTPUTS}
    to_engine = {"input_ids": "_input_ids", "request": "_request"}
    to_text = {"chunk": "_chunk"}
    maps = {
        name: (dict(step.input_map), dict(step.output_map), step.model_version)
        for name, step in steps.items()
    }
    assert maps == {
        "tokenizer": (same_in, to_engine, -1),
        "llm_engine": (to_engine, to_text, -1),
        "detokenizer": (to_text, same_out, -1),
    }


def test_the_client_knows_the_same_names() -> None:
    def spelled(tensors: Iterable[Tensor]) -> dict[str, str]:
        spellings = {"STRING": "BYTES"}
        short = {tensor.name: tensor.data_type.removeprefix("TYPE_") for tensor in tensors}
        return {name: spellings.get(kind, kind) for name, kind in short.items()}

    assert dict(client.INPUTS) == spelled(TEXT_INPUTS)
    assert dict(client.OUTPUTS) == spelled(TEXT_OUTPUTS)
    lists = {t.name for t in TEXT_INPUTS if -1 in t.dims}
    assert lists == client.LISTS


def test_outputs_are_asked_for_by_inputs() -> None:
    for output in OUTPUTS:
        assert all(name in BY_NAME for name in output.asked_by)
        assert output.asked_by or output.name == "text_output"


def test_a_name_is_offered_or_refused() -> None:
    """Some are both: declared for clients that always send them, and refused except one value."""
    assert set(NEUTRAL) & set(BY_NAME) == {
        *("beam_width", "length_penalty", "bad_words"),
        *("return_context_logits", "return_generation_logits", "return_kv_cache_reuse_stats"),
    }
