"""Checks whether a model can be served with the options, from the files of its checkpoint.

Knows config.json, the list of weights and the size of this machine. Like ``precheck``, it must not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Final

from minisgl_backend.config import EngineOptions
from minisgl_backend.device.processor import default_dtype
from minisgl_backend.errors import ConfigError
from minisgl_backend.host_memory import HostMemory
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.checkpoint import check_weights, weight_files
from minisgl_backend.models.eagle_checkpoint import load_eagle
from minisgl_backend.models.hub import resolve_model, resolve_tokenizer
from minisgl_backend.models.recurrent_spec import state_bytes
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.request_defaults import request_defaults
from minisgl_backend.weight_format import CONVERT_TO_FP8

_ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
)


def checked_spec(options: EngineOptions, folder: Path, device: str | None) -> ModelSpec:
    """The model in ``folder``, if its files and this machine allow loading it.

    Raises ``ConfigError`` if config.json is invalid or does not describe the weights, if the heads
    cannot be split over the ranks, if a GPU has no kernels for heads of these sizes, if a CPU's
    memory cannot hold what is asked for, if an MTP or EAGLE-3 layer is asked for that is not
    supported, or if requests cannot have what the checkpoint recommends.
    """
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = resolve_tokenizer(options.tokenizer, options.model_source)
    spec = load_spec(folder, tokenizer)
    if options.speculative_mtp_model is not None:
        layer_folder = resolve_model(options.speculative_mtp_model, options.model_source)
        has_weights = options.load_format == "auto"
        spec = spec.with_eagle(load_eagle(layer_folder, spec, folder, has_weights=has_weights))
    elif options.speculative_mtp_tokens:
        spec = spec.with_mtp()
    request_defaults(options)
    if options.quantization is not None:
        if spec.weights is not None:
            raise ConfigError(
                f"option quantization={options.quantization} is for plain weights; those of "
                f"{folder} are quantized: {spec.weights}; without the option they are served so"
            )
        spec = replace(spec, weights=CONVERT_TO_FP8)
    spec.attention_shape(options.tensor_parallel_size)
    if spec.recurrent is not None:
        spec.recurrent.of_rank(options.tensor_parallel_size)
    if options.enable_lora and spec.latent is not None:
        raise ConfigError(
            f"option enable_lora: adapters are not supported for latent attention, which "
            f"{spec.architecture} has"
        )
    _check_experts(options, spec)
    if options.batch_invariant:
        check_invariant_spec(spec)
    _check_windows(options, spec)
    for name in ("state_snapshots", "state_dtype"):
        if getattr(options, name) and spec.recurrent is None:
            raise ConfigError(f"option {name}: {spec.architecture} has no recurrent layers")
    if options.state_dtype and spec.recurrent is not None and not prod(spec.recurrent.matrices):
        raise ConfigError(
            f"option state_dtype: the recurrent states of {spec.architecture} are inputs of "
            "convolutions, which have the type of the activations"
        )
    if options.enable_lora and spec.names.scaled:
        raise ConfigError(
            f"option enable_lora: {spec.architecture} has multipliers that are in its weights, and "
            "would be missing in what adapters add"
        )
    if options.load_format == "auto":
        check_weights(spec, weight_files(folder, spec.names))
    if device == "cpu":
        _check_memory(options, spec)
    return spec


def check_invariant_spec(spec: ModelSpec) -> None:
    """Raise ``ConfigError`` if ``batch_invariant`` has no kernel for something in the model."""
    experts = None if spec.moe is None else spec.moe.experts
    unknown = {
        "quantized weights": spec.weights is not None,
        "recurrent layers": spec.recurrent is not None,
        "latent attention": spec.latent is not None,
        "layers that differ in their heads": bool(spec.heads_by_layer),
        "layers with inputs of their own": spec.layer_inputs is not None or spec.scaled_layers,
        "attention sinks": spec.scores.sinks,
        "bounded scores": spec.scores.cap != 0,
        "gated attention": spec.attention_gates is not None,
        "norms of the outputs of a layer's parts": spec.norms.place != "before",
        "norms over all heads of a token": spec.qk_norm == "token",
        "gates by GELU": spec.gate == "gelu",
        "feed-forward blocks without gates": spec.gate is None,
        "norms that subtract the mean": spec.norms.centered,
        "layers of a single part": bool(spec.single_parts),
        "learned positions": spec.positions is not None,
        "several residual streams": spec.streams is not None,
        "layers whose parts are side by side": spec.parallel in ("parts", "normed parts"),
        "routers that compute in float32": experts is not None and experts.routing.wide,
        "routers with biases": experts is not None and experts.biases,
        "experts that all tokens take": experts is not None and experts.shared is not None,
    }
    for what, is_there in unknown.items():
        if is_there:
            raise ConfigError(f"option batch_invariant: there are no kernels for {what}")


def _check_experts(options: EngineOptions, spec: ModelSpec) -> None:
    """Raise ``ConfigError`` if options are about experts and the model has none, or if the ranks
    cannot share out whole experts evenly."""
    if spec.moe is None:
        for name in ("expert_parallel", "moe_backend"):
            if getattr(options, name):
                raise ConfigError(f"option {name}: {spec.architecture} has no experts")
        return
    if not options.expert_parallel:
        return
    num_experts, ranks = spec.moe.experts.num_experts, options.tensor_parallel_size
    if num_experts % ranks:
        raise ConfigError(
            f"option expert_parallel: {num_experts} experts cannot be shared out evenly over "
            f"{ranks} tensor-parallel ranks"
        )


def _check_windows(options: EngineOptions, spec: ModelSpec) -> None:
    """Raise ``ConfigError`` if sections of attention would begin within a page, or if pages that
    rows share are to be read together and no layer can do so."""
    shape = spec.attention_shape().for_context(context_of(options, spec))
    section = shape.section
    if section is not None and section % options.page_size:
        raise ConfigError(
            f"page_size {options.page_size} must divide attention_chunk_size {section} of the "
            f"model, unless max_sequence_length is at most {section}"
        )
    if options.group_attention and shape.window_pages and None not in shape.windows:
        raise ConfigError(
            f"option group_attention=true does not go with windows of {shape.window} positions in "
            f"all layers, unless max_sequence_length is at most {shape.window}"
        )


def context_of(options: EngineOptions, spec: ModelSpec) -> int:
    """The most tokens of a request. Raises ``ConfigError`` if that exceeds the model's context."""
    wanted, most = options.max_sequence_length, spec.context
    if wanted is not None and wanted > most:
        raise ConfigError(f"max_sequence_length {wanted} exceeds the model's context of {most}")
    return wanted or most


def state_dtype_name(options: EngineOptions, spec: ModelSpec) -> str:
    """The type of recurrent states: the option's, or the checkpoint's."""
    of_model = "float32" if spec.recurrent is None else spec.recurrent.state_dtype
    return options.state_dtype or of_model


def _check_memory(options: EngineOptions, spec: ModelSpec) -> None:
    """Raise ``ConfigError`` if weights, pages and tables exceed the memory of the machine, or of
    its container.

    Compares with all memory, not with what is free now. All ranks and replicas on this machine
    share it.
    """
    replicas, num_nodes = options.data_parallel_size, options.nnodes or 1
    context = context_of(options, spec)
    num_ranks = options.tensor_parallel_size * replicas // num_nodes
    item_bytes = _ITEM_BYTES[options.dtype or default_dtype(spec.dtype, spec.num_parameters)]
    page_size, num_pages = options.page_size, options.num_pages or 1
    # what each rank holds: several may hold the same KV head, and all hold latents
    shape = spec.attention_shape(options.tensor_parallel_size).for_context(context)
    of_position = shape.numbers_per_position(window_pages=False)
    if not of_position:  # all layers have windows: there are at least half as many window pages
        of_position = shape.numbers_per_position(window_pages=True) // 2
    kv_bytes = of_position * (item_bytes if options.kv_cache_dtype is None else 1)
    table_entries = options.max_running_requests * -(-context // page_size)
    num_slots = options.max_loras if options.enable_lora else 0
    adapter_bytes = options.max_lora_rank * num_adapted(spec) * item_bytes
    recurrent, num_snapshots = spec.recurrent, options.state_snapshots or 0
    if recurrent is None or options.cache == "naive":
        snapshot_bytes = 0
    else:
        of_matrices = _ITEM_BYTES[state_dtype_name(options, spec)]
        snapshot_bytes = state_bytes(recurrent, item_bytes, of_matrices)
    needs = {
        f"the weights, as config.json has them ({spec.num_parameters:,} numbers),": (
            replicas * spec.num_parameters * item_bytes // num_nodes
        ),
        f"num_pages={num_pages} of {page_size} positions": (
            num_ranks * num_pages * page_size * kv_bytes
        ),
        f"host_cache_gib={options.host_cache_gib:g}": (
            int(replicas * options.host_cache_gib * 2**30) // num_nodes
        ),
        f"state_snapshots={num_snapshots}, of recurrent states": (
            replicas * num_snapshots * snapshot_bytes // num_nodes
        ),
        f"max_loras={options.max_loras} of rank {options.max_lora_rank}": (
            replicas * num_slots * adapter_bytes // num_nodes
        ),
        f"max_sequence_length={context}, for tables of positions and pages,": (
            num_ranks * (4 * spec.rotary_head_dim(0) * context + 8 * table_entries)
        ),
    }
    memory = HostMemory.now().total
    if sum(needs.values()) > memory:
        largest = max(needs, key=lambda what: needs[what])
        raise ConfigError(
            f"{largest} would take {needs[largest]:,} bytes, "
            f"and this process may use {memory:,} bytes of memory"
        )


def num_adapted(spec: ModelSpec) -> int:
    """Number of inputs and outputs of all projections that take adapters. For each, an adapter of
    rank r has r numbers."""
    hidden, found = spec.hidden_size, 0
    for layer in range(spec.num_layers):
        if spec.attends(layer):
            heads = spec.heads_of(layer)
            num_outs = 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
            found += (4 + spec.gates_apart) * hidden + num_outs + spec.num_gates(layer)
        inner: int | None = spec.intermediate_size_of(layer)
        if spec.moe is not None and layer in spec.moe.layers and not spec.moe.beside:
            shared = spec.moe.experts.shared
            inner = None if shared is None else shared.intermediate_size
        if inner is not None and spec.has_part(layer, "feed-forward"):
            found += (2 if spec.gate is None else 3) * (hidden + inner)
    return found
