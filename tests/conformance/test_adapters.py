"""Greedy tokens of batches with LoRA adapters equal those of transformers with merged weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.request import Adapter, IntArray
from minisgl_kit.adapters import write_adapter
from tests.conformance.adapter_folders import ATTENTION, merged, write_adapter_of
from tests.conformance.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.conformance.engines import TinyEngine, load_model, prompts_with_shared_prefixes
from tests.conformance.quantized_checkpoints import write_quantized
from tests.conformance.test_tokens_equal_transformers import GREEDY, Answers

ADAPTERS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 8, "targets": ("q_proj", "v_proj")},
    {"rank": 16, "use_rslora": True, "lora_alpha": 8},
    {"rank": 64},
    {"rank": 5, "targets": ("gate_proj", "down_proj")},
    {"rank": 32, "targets": ("o_proj", "up_proj"), "lora_alpha": 16.5},
    {"rank": 6, "targets": ATTENTION},
    {"rank": 24, "lora_alpha": 12},
]
MOST_RANK = 64
MODELS = [
    "qwen3",
    "llama-biases",
    "qwen2",
    "mistral-window",
    "qwen3-moe",
    "qwen2-moe",
    "olmo2",
    "gemma3",
    "gemma4-per-layer",
    "granite",
    "qwen3.5",
]
OPTIONS: list[tuple[str, int, dict[str, Any]]] = [
    ("few-slots", 2, {"page_size": 1, "overlap": False}),
    ("all-slots", 8, {"page_size": 16}),
    ("chunked", 3, {"page_size": 16, "radix": False, "chunk": 7}),
    ("retracted", 8, {"page_size": 1, "num_positions": 300, "reserve_tokens": 0}),
]
FULL = ("qwen3", "mistral-window", "qwen3-moe", "qwen3.5")
"""Models that run with all ``OPTIONS``; by day the others run with the first alone."""
SEED = 100  # with it no two tokens of any answer nearly tie


@dataclass(frozen=True)
class Reference:
    """A model, adapters for it, and what transformers answers to 16 prompts, each with one of the
    adapters or with none."""

    model: Decoder
    folder: Path
    paths: list[Path]
    prompts: list[IntArray]
    picks: list[int]
    answers: Answers


@pytest.fixture(scope="module")
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    case: str = request.param
    folder = tmp_path_factory.mktemp(case)
    return answered(write_checkpoint(case, folder), folder, all_targets=case != "qwen3-moe")


def answered(theirs: Any, folder: Path, *, all_targets: bool = True) -> Reference:
    """The reference of a checkpoint in ``folder``; experts take no adapters."""
    spec = load_spec(folder)
    paths, models = [], [theirs]
    for index, fields in enumerate(ADAPTERS):
        chosen = fields if all_targets else {**fields, "targets": ATTENTION}
        path = write_adapter(folder / f"adapter-{index}", spec, seed=SEED + index, **chosen)
        paths.append(path)
        models.append(merged(theirs, path))
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=110, seed=7)
    picks = [index % len(models) for index in range(len(prompts))]
    answers = Answers([models[pick] for pick in picks], prompts)
    return Reference(load_model(folder, context=CONTEXT), folder, paths, prompts, picks, answers)


def loaded(
    reference: Reference, num_slots: int
) -> tuple[AdapterSlots, AdapterStore, list[Adapter | None]]:
    """Slots in the model, and the adapters in main memory; the first one is None."""
    slots = AdapterSlots(reference.model, num_slots, MOST_RANK, torch.device("cpu"))
    store = AdapterStore(slots, pinned=False)
    adapters: list[Adapter | None] = [None]
    for index, path in enumerate(reference.paths, start=1):
        adapters.append(Adapter(index, path.name, str(path), store.read(index, path)))
    return slots, store, adapters


@pytest.mark.parametrize(
    ("reference", "num_slots", "options"),
    [
        pytest.param(
            *(model, num_slots, options),
            id=f"{model}-{name}",
            marks=[] if model in FULL or name == "few-slots" else [pytest.mark.nightly],
        )
        for model in MODELS
        for name, num_slots, options in OPTIONS
    ],
    indirect=["reference"],
)
def test_tokens_of_mixed_batches_are_equal(
    reference: Reference, num_slots: int, options: dict[str, Any]
) -> None:
    slots, store, adapters = loaded(reference, num_slots)
    chosen = [adapters[pick] for pick in reference.picks]
    with TinyEngine(
        reference.model, context=CONTEXT, adapter_slots=slots, adapter_store=store, **options
    ) as engine:
        sampling = [GREEDY] * len(chosen)
        outcome = engine.run(reference.prompts, sampling, chosen)
        expected = reference.answers.tokens(outcome.tokens)
        assert outcome.tokens == expected
        if "num_positions" in options:
            assert engine.num_retractions > 0
        elif options.get("radix", True):
            # prefixes left by requests with other adapters are no use, but their own are; the
            # latest requests come first, since few snapshots of recurrent states are kept
            again = engine.run(reference.prompts[::-1], sampling, chosen[::-1])
            assert again.tokens == expected[::-1]
            # if there are few window pages, later rows may need those of a prefix
            few = reference.model.spec.attention_shape().for_context(CONTEXT).window_pages
            assert again.num_cached_tokens > (0 if few else outcome.num_cached_tokens)


@pytest.mark.parametrize(
    "case", ["fp8-blocks", "ct-fp8-tensor-static", "awq-128", "ct-w4a16-group"]
)
def test_adapters_over_quantized_weights(case: str, tmp_path: Path) -> None:
    """Weights are dequantized while they load, or kept as they are."""
    reference = answered(write_quantized(case, tmp_path), tmp_path)
    for keep_quantized in (False, True):
        model = load_model(tmp_path, context=CONTEXT, keep_quantized=keep_quantized)
        slots, store, adapters = loaded(replace(reference, model=model), len(ADAPTERS))
        chosen = [adapters[pick] for pick in reference.picks]
        with TinyEngine(
            model, page_size=16, context=CONTEXT, adapter_slots=slots, adapter_store=store
        ) as engine:
            outcome = engine.run(reference.prompts, [GREEDY] * len(chosen), chosen)
        assert outcome.tokens == reference.answers.tokens(outcome.tokens)


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        ("phi3", ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")),
        ("glm4", ("q_proj", "k_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("exaone4", ("q_proj", "k_proj", "v_proj", "gate_proj", "down_proj")),
        ("ernie-biases", ("q_proj", "o_proj", "up_proj", "down_proj")),
        ("hunyuan", ("q_proj", "k_proj", "o_proj", "gate_proj")),
        ("ernie-moe", ("q_proj", "v_proj", "o_proj")),
        ("exaone4.5", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("hyperclova", ("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")),
        ("internlm3-biases", ("q_proj", "v_proj", "o_proj", "down_proj")),
        ("granite-swa", ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")),
        ("afmoe", ("q_proj", "v_proj", "o_proj", "gate_proj")),
        ("granite-shared", ("q_proj", "v_proj", "input_linear", "output_linear")),
        ("granite-moe-swa", ("q_proj", "k_proj", "o_proj")),
        ("iquest-coder", ("q_proj", "v_proj", "up_proj")),
        ("hy-v3", ("q_proj", "o_proj", "gate_proj", "down_proj")),
        ("qwen3.5-multimodal", ("q_proj", "v_proj", "o_proj", "up_proj")),
        ("nemotron-h", ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
        ("nemotron-h-experts", ("q_proj", "up_proj", "down_proj")),
        ("laguna", ("q_proj", "o_proj", "g_proj")),
        ("step3.7", r".*\.language_model\..*\.(q_proj|o_proj|g_proj|up_proj|down_proj)"),
        ("starcoder2", ("q_proj", "v_proj", "o_proj", "c_fc", "c_proj")),
        ("opt", ("q_proj", "v_proj", "out_proj", "fc1", "fc2")),
        ("gpt-neox", ("query_key_value", "dense", "dense_h_to_4h")),
        ("falcon-groups", ("query_key_value",)),
        ("falcon", ("query_key_value", "dense_4h_to_h")),
        ("phi", ("q_proj", "k_proj", "v_proj", "dense", "fc1")),
        ("cohere2", ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")),
        ("lfm2", ("q_proj", "k_proj", "v_proj", "w1", "w2", "w3")),
        ("lfm2", r".*\.(self_attn\.out_proj|w2)"),
        ("lfm3", ("q_proj", "g_proj", "o_proj", "w1")),
        ("olmo-hybrid", r".*\.(self_attn\.(q|k|v|o)_proj|mlp\.\w+)"),
        ("granite-hybrid-dense", ("k_proj", "o_proj", "input_linear", "output_linear")),
        ("muse-glimmer", r".*\.language_model\..*\.(q_proj|v_proj|o_proj|gate_proj|down_proj)"),
        ("nanochat", ("q_proj", "o_proj", "fc1", "fc2")),
        ("flint", ("q_proj", "v_proj", "o_proj")),
        ("hyperclova-seeing-published", r".*\.language_model\..*\.(q_proj|o_proj|down_proj)"),
        ("minicpm-v4.6", r".*\.language_model\..*\.(q_proj|o_proj|up_proj)"),
        ("voxtral", r".*\.language_model\..*\.(q_proj|down_proj)"),
    ],
)
def test_adapters_may_have_the_names_of_the_checkpoint(
    case: str, targets: tuple[str, ...] | str, tmp_path: Path
) -> None:
    """One name may stand for several projections, or belong to the text part of a larger model."""
    theirs = write_checkpoint(case, tmp_path)
    path = write_adapter_of(theirs, tmp_path / "adapter", rank=6, targets=targets)
    check_tokens(tmp_path, path, merged(theirs, path))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_weights_with_inputs_first(tmp_path: Path) -> None:
    """As PEFT itself makes and merges them for GPT-2, whose merged projection is one target."""
    theirs: Any = write_checkpoint("gpt2", tmp_path)
    config = LoraConfig(
        r=6, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    adapted: Any = get_peft_model(theirs, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    adapted.save_pretrained(tmp_path / "adapter")
    check_tokens(tmp_path, tmp_path / "adapter", adapted.merge_and_unload())


def check_tokens(folder: Path, path: Path, expected: Any) -> None:
    """The model in ``folder`` with the adapter at ``path`` must answer as transformers' model
    ``expected``."""
    model = load_model(folder, context=CONTEXT)
    slots = AdapterSlots(model, 1, 8, torch.device("cpu"))
    store = AdapterStore(slots, pinned=False)
    adapter = Adapter(1, "adapter", str(path), store.read(1, path))
    prompts = prompts_with_shared_prefixes(vocab_size=VOCAB_SIZE, longest=60, seed=7)
    with TinyEngine(
        model, page_size=16, context=CONTEXT, adapter_slots=slots, adapter_store=store
    ) as engine:
        outcome = engine.run(prompts, [GREEDY] * len(prompts), [adapter] * len(prompts))
    assert outcome.tokens == Answers([expected] * len(prompts), prompts).tokens(outcome.tokens)


@pytest.mark.parametrize("reference", MODELS, indirect=True)
def test_an_adapter_of_zeros_changes_nothing(reference: Reference) -> None:
    path = write_adapter(
        reference.folder / "zeros",
        load_spec(reference.folder),
        rank=8,
        targets=ATTENTION,
        strength=0,
    )
    slots = AdapterSlots(reference.model, 1, 8, torch.device("cpu"))
    store = AdapterStore(slots, pinned=False)
    zeros = Adapter(1, "zeros", str(path), store.read(1, path))
    with TinyEngine(
        reference.model, context=CONTEXT, page_size=16, adapter_slots=slots, adapter_store=store
    ) as engine:
        sampling = [GREEDY] * len(reference.prompts)
        base = engine.run(reference.prompts, sampling)
        same = engine.run(reference.prompts, sampling, [zeros] * len(reference.prompts))
    assert same.tokens == base.tokens


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_computes_what_merged_weights_do(tmp_path: Path) -> None:
    """This file's reference against PEFT itself."""
    theirs = write_checkpoint("qwen3", tmp_path / "model")
    spec = load_spec(tmp_path / "model")
    ids = torch.arange(1, 40)[None]
    for index, fields in enumerate(ADAPTERS):
        path = write_adapter(tmp_path / f"{index}", spec, seed=index, **fields)
        expected = merged(theirs, path)(ids).logits
        adapted: Any = PeftModel.from_pretrained(theirs, path)
        torch.testing.assert_close(adapted(ids).logits, expected, rtol=1e-4, atol=1e-4)
        adapted.unload()


@pytest.mark.parametrize("reference", ["qwen3"], indirect=True)
def test_prefixes_in_main_memory_are_those_of_an_adapter(reference: Reference) -> None:
    """The pages hold too little for all of them."""
    slots, store, adapters = loaded(reference, 8)
    chosen = [adapters[pick] for pick in reference.picks]
    with TinyEngine(
        reference.model,
        context=CONTEXT,
        adapter_slots=slots,
        adapter_store=store,
        page_size=4,
        num_positions=400,
        num_host_slots=1000,
    ) as engine:
        for _ in range(2):
            outcome = engine.run(reference.prompts, [GREEDY] * len(chosen), chosen)
            assert outcome.tokens == reference.answers.tokens(outcome.tokens)
        assert engine.num_loaded_tokens > 0
