"""One rank's part of an engine: its part of the model, its pages and its executor.

Names the concrete classes of the executor's side, as ``build`` does for the rest. Must not know the
planner, or which requests there will be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from minisgl_backend.attention.base import AttentionSetting, PagedAttention, ScheduledDecode
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.device.cuda import CudaDevice
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.graph_sizes import (
    graph_sizes,
    max_captured_batch_size,
    most_decode_rows,
)
from minisgl_backend.execution.prompt_logprobs import rows_at_once
from minisgl_backend.execution.ranks import RankExecutor
from minisgl_backend.execution.stages import ExecutorLimits
from minisgl_backend.kernels.linear_cut import takes_codes
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.kernel_choice import (
    has_expert_kernels,
    has_hopper_kernels,
    round_mtp_head,
    use_invariant_kernels,
    use_tensor_cores,
)
from minisgl_backend.packages import slower_without
from minisgl_backend.parallel.group import Group
from minisgl_backend.parts import Parts
from minisgl_backend.progress import Progress, shown, unseen
from minisgl_backend.rank_memory import (
    CacheSizes,
    cache_sizes,
    make_host_slots,
    make_states,
    make_storage,
)
from minisgl_backend.resolve import Resolved
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.weight_format import WeightFormat

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Rank:
    """One rank's part of an engine. Rank 0 has ``adapters`` in main memory, if requests may name
    any."""

    info: EngineInfo
    executor: RankExecutor
    group: Group
    adapters: AdapterStore | None = None


def build_rank(
    facts: Resolved,
    join: Callable[[], Group],
    meet: Callable[[], None],
    parts: Parts,
) -> Rank:
    """Build one rank's part. All ranks of an engine call this at the same time.

    ``join`` returns the group of all ranks. ``meet`` returns when every rank has called it, and
    raises if one of them has failed. So no rank waits in a collective operation for a rank that has
    not started or is still loading.
    """
    meet()
    group = join()
    progress = shown if group.rank == 0 else unseen
    _log_free_memory(facts, "before loading")
    model = _model(facts, group, progress)
    _log_free_memory(facts, "after loading the weights")
    slots, store = _adapter_slots(facts, model), None
    if slots is not None and group.rank == 0:
        store = AdapterStore(slots, pinned=not facts.device.is_host)
    meet()
    sizes = cache_sizes(facts, group)
    states = make_states(facts, sizes)
    storage = make_storage(facts, sizes)
    host_slots = make_host_slots(facts, sizes, storage, states)
    _log_free_memory(facts, f"after making {storage.num_pages} KV pages")
    model.bind_pages(storage.layers)
    if states is not None:
        model.bind_states(states.layers)
    max_captured = 0
    if isinstance(facts.device, CudaDevice):
        if group.rank == 0:
            _warn_if_slower(facts.device)
        max_captured = max_captured_batch_size(facts.options, facts.weights_per_layer)
    attention = _attention(facts, max_captured)
    if isinstance(facts.device, CudaDevice):
        if facts.options.batch_invariant:
            use_invariant_kernels(model, facts.device.torch_device)
        else:
            use_tensor_cores(model, facts.device.torch_device)
        facts.device.catch_up()  # wait for the weights, the pages and what kernels keep
    executor = ModelExecutor(
        model,
        storage=storage,
        states=states,
        attention=attention,
        device=facts.device,
        limits=_limits(facts, attention, model, max_captured),
        adapter_slots=slots,
        adapter_store=store,
        watch_logits=parts.watch_logits,
        progress=progress,
        host_slots=host_slots,
    )
    meet()
    info = _info(facts, attention, sizes)
    return Rank(info, parts.executor(executor), group, store)


def _log_free_memory(facts: Resolved, when: str) -> None:
    free_bytes = facts.device.free_memory()
    logger.info("%s: %.2f GiB free %s", facts.device.torch_device, free_bytes / 2**30, when)


def _warn_if_slower(device: CudaDevice) -> None:
    """Warn once about all missing packages without which this GPU uses slower layers."""
    line = slower_without(torch.cuda.get_device_capability(device.torch_device)[0])
    if line is not None:
        logger.warning(line)


def _info(facts: Resolved, attention: PagedAttention, sizes: CacheSizes) -> EngineInfo:
    options, spec = facts.options, facts.spec
    return EngineInfo(
        model=options.model,
        folder=str(facts.folder),
        architecture=spec.architecture,
        device=str(facts.device.torch_device),
        dtype=str(facts.dtype).removeprefix("torch."),
        weights="plain" if spec.weights is None else str(spec.weights),
        attention_backend=attention.name,
        vocab_size=spec.vocab_size,
        eos_token_ids=tuple(sorted(spec.eos_token_ids)),
        max_sequence_length=facts.context,
        page_size=options.page_size,
        num_pages=sizes.num_pages,
        num_snapshots=sizes.num_snapshots,
        num_window_pages=sizes.num_window_pages,
        window=None if sizes.num_window_pages is None else facts.shape.window,
        num_host_slots=sizes.host.num_slots,
        num_window_slots=sizes.host.num_window_slots,
        num_state_slots=sizes.host.num_state_slots,
        section=facts.shape.section,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        max_queue_time_s=options.max_queue_time_s,
        generates=spec.generates,
        reads_groups=attention.reads_groups,
    )


def _model(facts: Resolved, group: Group, progress: Progress) -> Decoder:
    options, on_gpu = facts.options, not facts.device.is_host
    fused_experts = on_gpu and options.moe_backend != "torch"
    parts = 1 if options.expert_parallel else group.size
    has_kernels = partial(has_hopper_kernels, facts.device.torch_device, facts.dtype)

    def keeps_experts(form: WeightFormat) -> bool:
        return fused_experts and has_expert_kernels(form, facts.spec, parts) and has_kernels()

    def takes(form: WeightFormat, out_features: int, in_features: int) -> bool:
        # On Hopper a plain weight is faster than codes without a kernel on tensor cores. It takes
        # twice the memory of 8 bits, and too much for users of 4.
        is_small = form.encoding.bits < 8
        return is_small or takes_codes(out_features, in_features) or not has_kernels()

    try:
        model = build_model(
            facts.spec,
            facts.folder,
            dtype=facts.dtype,
            device=facts.device.torch_device,
            group=group,
            load_format=options.load_format,
            max_sequence_length=facts.context,
            eagle=facts.layer_folder,
            seed=options.seed or 0,
            whole_experts=options.expert_parallel,
            progress=progress,
            kernels=KernelChoices(
                fused_experts=fused_experts,
                keep_quantized=on_gpu,
                keeps_experts=keeps_experts,
                takes=takes if on_gpu else None,
            ),
        )
        model.pack()
        if on_gpu and not options.batch_invariant:
            round_mtp_head(model, facts.device.torch_device)
        return model
    except torch.OutOfMemoryError as error:
        gpu, num_weights = facts.device.torch_device, facts.spec.num_parameters
        num_bytes = num_weights * facts.dtype.itemsize // group.size
        # PyTorch still reserves the memory of the weights that did fit
        free_bytes = torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)
        raise ConfigError(
            f"the weights, as config.json has them ({num_weights:,} numbers), would take about "
            f"{num_bytes:,} bytes of {gpu}, which has {free_bytes:,} free: use more GPUs "
            "(tensor_parallel_size), or end other processes on it"
        ) from error


def _adapter_slots(facts: Resolved, model: Decoder) -> AdapterSlots | None:
    """Memory for adapters in the model's layers, if requests may name any."""
    options, gpu = facts.options, facts.device.torch_device
    if not options.enable_lora:
        return None
    try:
        slots = AdapterSlots(model, options.max_loras, options.max_lora_rank, gpu)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"max_loras={options.max_loras} adapters of max_lora_rank={options.max_lora_rank} do "
            f"not fit {gpu} beside the weights"
        ) from error
    logger.info(
        "%d slots for adapters of rank %d take %.2f GiB",
        slots.num_slots,
        slots.max_rank,
        slots.num_bytes / 2**30,
    )
    return slots


def _attention(facts: Resolved, max_captured_batch_size: int) -> PagedAttention:
    options, wanted = facts.options, facts.options.group_attention
    attention = choose_attention(
        options.attention_backend,
        AttentionSetting(
            shape=facts.shape,
            page_size=options.page_size,
            max_sequence_length=facts.context,
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            max_batch_size=most_decode_rows(options),
            max_captured_batch_size=max_captured_batch_size,
            device=facts.device.torch_device,
            grouped=wanted is not False
            and options.cache != "naive"
            and not options.batch_invariant,
            batch_invariant=options.batch_invariant,
            most_written=1 + options.most_guessed,
        ),
    )
    if wanted and not attention.reads_groups:
        raise ConfigError(
            f"group_attention=true does not go with attention_backend {attention.name}: on a GPU "
            "it needs cuda for decoding, dtype bfloat16, and heads of up to 128 elements"
        )
    has_schedule = isinstance(attention.decode, ScheduledDecode)
    needs_lengths = has_schedule or not (attention.can_capture or facts.device.is_host)
    if options.speculative_mtp_tokens > 1 and needs_lengths:
        raise ConfigError(
            f"attention_backend {attention.name} needs lengths on the host, which are not known "
            f"there for guesses after the first: with it, speculative_mtp_tokens is at most 1, not "
            f"{options.speculative_mtp_tokens}"
        )
    return attention


def _limits(
    facts: Resolved, attention: PagedAttention, model: Decoder, max_captured_batch_size: int
) -> ExecutorLimits:
    options = facts.options
    sizes: tuple[list[int], list[int]] = ([], [])
    if not facts.device.is_host:
        sizes = graph_sizes(
            options,
            attention,
            max_batch_size=max_captured_batch_size,
            weights_per_layer=facts.weights_per_layer,
        )
    return ExecutorLimits(
        max_rows=options.max_running_requests,
        max_sequence_length=facts.context,
        max_prefill_tokens=options.max_prefill_tokens,
        graph_sizes=tuple(sizes[0]),
        chunk_graph_sizes=tuple(sizes[1]),
        scored_at_once=rows_at_once(model.spec.vocab_size, model.dtype),
        # on all ranks, though only rank 0 has masks: captured sums need every rank
        takes_masks=options.structured_outputs,
        section=facts.shape.section,
        most_guesses=options.most_guesses,
        most_checks=options.most_checks,
        mtp_tokens=options.speculative_mtp_tokens,
    )
