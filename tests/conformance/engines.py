"""Planner and executor on a CPU, put together as the engine's loop does, without its threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from minisgl_backend.attention.base import AttentionSetting
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.cache.host import HostCache
from minisgl_backend.cache.host_windows import HostWindows
from minisgl_backend.cache.kv import KVCache
from minisgl_backend.cache.naive_cache import NaiveCache
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.cache.snapshots import SnapshotCache
from minisgl_backend.cache.windows import WindowPages
from minisgl_backend.device.base import Device
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.execution.executor import ModelExecutor
from minisgl_backend.execution.host_pages import HostPages
from minisgl_backend.execution.host_slots import HostSlots
from minisgl_backend.execution.host_states import HostStates
from minisgl_backend.execution.stages import ExecutorLimits
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.kernels.quantized import FP8_MAX
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.build import KernelChoices, build_model
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.eagle_checkpoint import load_eagle
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.plan import Pending, StepPlan
from minisgl_backend.progress import unseen
from minisgl_backend.request import (
    Adapter,
    Failed,
    FloatArray,
    IntArray,
    PromptLogprobs,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime import ports
from minisgl_backend.scheduling.checks import moved_back
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig

MAX_ROWS = 16


def load_model(
    folder: Path,
    *,
    context: int,
    dtype: torch.dtype = torch.float32,
    fused: bool = False,
    keep_quantized: bool = False,
    mtp: bool = False,
    eagle: Path | None = None,
    group: Group | None = None,
) -> Decoder:
    """The checkpoint on the CPU, perhaps with its MTP layer, or with the EAGLE-3 layer in the
    folder ``eagle``; if ``fused``, computed by the twins of a GPU's kernels."""
    spec = load_spec(folder)
    if mtp:
        spec = spec.with_mtp()
    if eagle is not None:
        spec = spec.with_eagle(load_eagle(eagle, spec, folder, has_weights=True))
    return build_model(
        spec,
        folder,
        eagle=eagle,
        dtype=dtype,
        device=torch.device("cpu"),
        group=group or OneRank(),
        max_sequence_length=context,
        kernels=KernelChoices(fused=fused, keep_quantized=keep_quantized),
    )


@dataclass(slots=True)
class Outcome:
    """What became of a batch of requests, in request order."""

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    prompt_logprobs: list[list[PromptLogprobs]]
    embeddings: dict[int, FloatArray] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0
    num_steps: int = 0


class TinyEngine(AbstractContextManager["TinyEngine"]):
    """Planner, executor and the loop between them."""

    def __init__(
        self,
        model: Decoder,
        *,
        page_size: int,
        context: int,
        num_positions: int = 8192,
        chunk: int = 32,
        radix: bool = True,
        num_snapshots: int = 6,
        num_host_slots: int = 0,
        num_state_slots: int = 6,
        num_window_slots: int = 40,
        overlap: bool = True,
        attention: str | None = None,
        device: Device | None = None,
        graph_sizes: tuple[int, ...] = (),
        chunk_graph_sizes: tuple[int, ...] = (),
        kv_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype = torch.float32,
        scales: Sequence[KVScale] | None = None,
        scored_at_once: int = 1024,
        takes_masks: bool = False,
        reserve_tokens: int = 256,
        speculative_tokens: int = 0,
        mtp_tokens: int = 0,
        adapter_slots: AdapterSlots | None = None,
        adapter_store: AdapterStore | None = None,
        wrap: Callable[[ports.Scheduler], ports.Scheduler] = lambda scheduler: scheduler,
    ):
        """``wrap`` gets the planner, and returns what takes its place. By default there are fewer
        ``num_snapshots``, for recurrent layers, than prompts, so that some are evicted."""
        most_guessed = max(speculative_tokens, mtp_tokens)
        num_checks = MAX_ROWS if most_guessed else 0
        device = device or CpuDevice()
        num_ranks, dtype = model.group.size, model.dtype
        shape = model.spec.attention_shape(num_ranks).for_context(context)
        kv_dtype = kv_dtype or dtype
        num_pages = -(-num_positions // page_size)
        cpu = device.torch_device
        windows = None
        if shape.window_pages:
            assert shape.window is not None
            of_row = -(-shape.window // page_size) + 2
            windows = WindowPages(  # too few for all rows
                10 * of_row + -(-chunk // page_size),
                num_pages=num_pages,
                page_size=page_size,
                window=shape.window,
            )
        self.storage = KVStorage(
            shape,
            num_pages=num_pages,
            page_size=page_size,
            dtype=kv_dtype,
            device=cpu,
            scales=scales,
            num_window_pages=None if windows is None else windows.num_window_pages,
        )
        # Memory that was never written must not count, whatever it holds.
        unwritten = torch.full((), 1e4 if kv_dtype.itemsize > 1 else FP8_MAX).to(kv_dtype)
        for pages in self.storage.pages:
            pages[:, :, :-1].copy_(unwritten)
        model.bind_pages(self.storage.layers)
        states: StateStorage | None = None
        if model.spec.recurrent is not None:
            num_snapshots = num_snapshots if radix else 0
            states = StateStorage(
                model.spec.recurrent,
                num_rows=MAX_ROWS,
                num_snapshots=num_snapshots,
                dtype=dtype,
                state_dtype=state_dtype,
                device=cpu,
                num_checks=num_checks,
                most_tokens=1 + most_guessed,
            )
            for of_layer in states.layers:  # a state that no token made must not be read
                of_layer.conv.fill_(torch.nan)
                of_layer.matrices.fill_(torch.nan)
            model.bind_states(states.layers)
        host_slots: HostSlots | None = None
        if num_host_slots:
            of_pages = of_windows = of_states = None
            if self.storage.page_bytes():
                of_pages = HostPages(self.storage, device, num_host_slots)
            if windows is not None:
                of_windows = HostPages(self.storage, device, num_window_slots, window_pages=True)
            if states is not None:
                of_states = HostStates(states, device, num_state_slots)
            host_slots = HostSlots(of_pages, of_windows, of_states)
        setting = AttentionSetting(
            shape=shape,
            page_size=page_size,
            max_sequence_length=context,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_batch_size=MAX_ROWS,
            max_captured_batch_size=max([0, *graph_sizes]),
            device=cpu,
        )
        self.executor = ModelExecutor(
            model,
            storage=self.storage,
            states=states,
            attention=choose_attention(attention, setting),
            device=device,
            limits=ExecutorLimits(
                max_rows=MAX_ROWS,
                max_sequence_length=context,
                max_prefill_tokens=chunk,
                graph_sizes=graph_sizes,
                chunk_graph_sizes=chunk_graph_sizes,
                scored_at_once=scored_at_once,
                takes_masks=takes_masks,
                most_guesses=most_guessed * MAX_ROWS,
                most_checks=num_checks,
                mtp_tokens=mtp_tokens,
            ),
            adapter_slots=adapter_slots,
            adapter_store=adapter_store,
            watch_logits=None,
            progress=unseen,
            host_slots=host_slots,
        )
        config = SchedulerConfig(
            max_running_requests=MAX_ROWS,
            max_prefill_tokens=chunk,
            reserve_tokens=reserve_tokens,
            num_adapter_slots=0 if adapter_slots is None else adapter_slots.num_slots,
            has_states=states is not None,
            section=shape.section,
            speculative_tokens=speculative_tokens,
            mtp_tokens=mtp_tokens,
            speculative_max_requests=MAX_ROWS,
        )
        cache: KVCache = NaiveCache(num_pages, page_size, windows=windows)
        host: HostCache | None = None
        if num_host_slots:
            host = HostCache(
                num_host_slots,
                page_size,
                num_state_slots=None if states is None else num_state_slots,
                windows=(
                    None
                    if windows is None
                    else HostWindows(num_window_slots, num_slots=num_host_slots, span=windows.span)
                ),
            )
        if radix and states is not None:
            cache = SnapshotCache(num_pages, page_size, num_snapshots, host=host)
        elif radix:
            cache = RadixCache(num_pages, page_size, windows=windows, host=host)
        scheduler = Scheduler(cache, config)
        self._check = scheduler.check
        self._scheduler = wrap(scheduler)
        self._overlap = overlap

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.executor.close()

    @property
    def num_retractions(self) -> int:
        """The retractions of all runs."""
        return self._scheduler.stats().num_retractions

    @property
    def num_loaded_tokens(self) -> int:
        """The tokens that came from main memory in all runs."""
        return self._scheduler.stats().host_loaded_tokens

    @property
    def num_guesses(self) -> tuple[int, int]:
        """The guesses of all runs, and the right ones among them."""
        stats = self._scheduler.stats()
        return stats.num_guesses, stats.num_right_guesses

    def run(
        self,
        prompts: Sequence[IntArray],
        sampling: Sequence[SamplingParams],
        adapters: Sequence[Adapter | None] | None = None,
    ) -> Outcome:
        """Serve all prompts at once."""
        adapters = [None] * len(prompts) if adapters is None else adapters
        outcome = Outcome([[] for _ in prompts], [[] for _ in prompts], [[] for _ in prompts])
        given = zip(prompts, sampling, adapters, strict=True)
        for index, (prompt, params, adapter) in enumerate(given):
            request_id = RequestId(index)
            self._scheduler.add(
                Request(id=request_id, prompt=prompt, sampling=params, adapter=adapter)
            )
        flight: tuple[StepPlan, Pending] | None = None
        while flight is not None or self._scheduler.has_work():
            plan = self._scheduler.plan()
            if plan is not None and plan.assumes_right:
                assert flight is not None
                plan = moved_back(plan, flight[0], flight[1].tokens())
            launched = None if plan is None else (plan, self.executor.launch(plan))
            if plan is not None:
                outcome.num_steps += 1
                outcome.num_cached_tokens += sum(a.num_cached_tokens for a in plan.admissions)
            if not self._overlap:
                flight, launched = launched, None
            if flight is not None:
                self._commit(*flight, outcome)
            flight = launched
        self._check()
        return outcome

    def _commit(self, plan: StepPlan, pending: Pending, outcome: Outcome) -> None:
        result = self._scheduler.commit(plan, pending.tokens())
        for request_id, scored in result.scored:
            outcome.prompt_logprobs[request_id].append(scored)
        for request_id, vector in result.embedded:
            assert request_id not in outcome.embeddings and request_id in result.ended
            outcome.embeddings[request_id] = vector
        for index, request_id in enumerate(result.request_ids):
            outcome.tokens[request_id].append(int(result.token_ids[index]))
            if index in result.logprobs:
                outcome.logprobs[request_id].append(result.logprobs[index])
        outcome.failed |= {id for id, event in result.ended.items() if isinstance(event, Failed)}


def prompts_with_shared_prefixes(
    *, vocab_size: int, longest: int, seed: int, count: int = MAX_ROWS
) -> list[IntArray]:
    """``count`` prompts of 5 to ``longest`` tokens; two thirds begin with one of two prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [rng.integers(0, vocab_size, longest * 2 // 3) for _ in range(2)]
    prompts = []
    for index in range(count):
        prefix = [*prefixes, rng.integers(0, vocab_size, 4)][index % 3]
        rest = rng.integers(0, vocab_size, int(rng.integers(1, longest - len(prefix) + 1)))
        prompts.append(np.concatenate([prefix, rest]).astype(np.int32))
    return prompts
