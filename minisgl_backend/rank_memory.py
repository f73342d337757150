"""A rank's memory for what plans refer to by number: pages, window pages, snapshots of states, and
slots of main memory for pages and states.

Decides how many there are, the same number on every rank, and makes the tensors for them. Must not
know the model's layers beyond the shapes of what they keep, or who uses a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.host_pages import HostPages
from minisgl_backend.execution.host_slots import HostSlots
from minisgl_backend.execution.host_states import HostStates
from minisgl_backend.execution.states import (
    StateStorage,
    bytes_per_slot,
    pending_bytes,
    unsettled_bytes,
)
from minisgl_backend.execution.storage import (
    KVStorage,
    WindowRule,
    bytes_per_page,
    choose_num_pages,
)
from minisgl_backend.host_memory import HostMemory
from minisgl_backend.kernels.paged_kv import KVScale
from minisgl_backend.kernels.sampling_table import SamplingTable
from minisgl_backend.models.kv_scales import read_kv_scales
from minisgl_backend.models.recurrent_spec import RecurrentSpec
from minisgl_backend.parallel.group import Group, least_free_memory
from minisgl_backend.resolve import Resolved

_TOKENS_OF_WINDOW: Final = 4096


class HostSizes(NamedTuple):
    """The slots of main memory, for pages, window pages and snapshots of states."""

    num_slots: int = 0
    num_window_slots: int = 0
    num_state_slots: int = 0


_NONE: Final = HostSizes()


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """How many pages, snapshots and window pages each rank has.

    ``num_snapshots`` is None if the model has no recurrent layers, ``num_window_pages`` if none
    have pages of their own. Main memory has the slots of ``host``.
    """

    num_pages: int
    num_snapshots: int | None = None
    num_window_pages: int | None = None
    host: HostSizes = _NONE


def cache_sizes(facts: Resolved, group: Group) -> CacheSizes:
    """How many pages and snapshots each rank gets: as many as the rank with the least free memory
    can hold.

    A collective: all ranks call it.
    """
    device, options = facts.device, facts.options
    cap_bytes = device.kv_bytes_cap
    host = choose_host_slots(facts)  # before any rank takes the memory
    # hosts may have different amounts of main memory
    may_differ = device.is_host and not facts.place.is_one_host
    free_bytes = least_free_memory(group, device.free_memory(), may_differ=may_differ)
    if cap_bytes is not None:  # a CPU's memory, which the ranks of a host share
        num_sharing = facts.place.local_size * options.data_parallel_size
        free_bytes //= num_sharing
        free_bytes -= _bytes_of(host, _host_slot_bytes(facts))
        cap_bytes //= num_sharing
    rows = options.max_running_requests + 1
    reserved_bytes = SamplingTable.num_bytes(rows, facts.spec.vocab_size, options.most_guesses)
    num_snapshots = None
    if facts.spec.recurrent is not None:
        slot_bytes = _slot_bytes(facts, facts.spec.recurrent)
        reserved_bytes += _state_bytes(facts, facts.spec.recurrent, num_snapshots=0)
        num_snapshots = choose_num_snapshots(
            options, slot_bytes, int(free_bytes * options.memory_ratio) - reserved_bytes, cap_bytes
        )
        reserved_bytes += num_snapshots * slot_bytes
    windows = _window_rule(facts)

    def sizes(num_pages: int) -> CacheSizes:
        of_windows = None if windows is None else windows.num_pages(num_pages)
        return CacheSizes(num_pages, num_snapshots, of_windows, host)

    if options.num_pages is not None:
        return sizes(options.num_pages)
    num_pages = choose_num_pages(
        page_bytes=_page_bytes(facts),
        page_size=options.page_size,
        free_bytes=free_bytes,
        reserved_bytes=reserved_bytes,
        memory_ratio=options.memory_ratio,
        cap_bytes=cap_bytes,
        max_rows=options.max_running_requests,
        windows=windows,
    )
    return sizes(num_pages)


def make_states(facts: Resolved, sizes: CacheSizes) -> StateStorage | None:
    """The recurrent states of rows and snapshots; None if the model has none. Raises
    ``ConfigError`` if they do not fit the device."""
    options, recurrent = facts.options, facts.spec.recurrent
    if recurrent is None:
        return None
    shape, num_snapshots = recurrent.of_rank(facts.place.size), sizes.num_snapshots or 0
    try:
        return StateStorage(
            shape,
            num_rows=options.max_running_requests,
            num_snapshots=num_snapshots,
            dtype=facts.dtype,
            state_dtype=facts.state_dtype,
            device=facts.device.torch_device,
            num_checks=options.most_checks,
            most_tokens=1 + options.most_guessed,
        )
    except torch.OutOfMemoryError as error:
        num_bytes = _state_bytes(facts, recurrent, num_snapshots)
        raise ConfigError(
            f"recurrent states of {options.max_running_requests} rows and {num_snapshots} "
            f"snapshots would take {num_bytes:,} bytes of "
            f"{facts.device.torch_device}, which has {facts.device.free_memory():,} free: lower "
            "max_running_requests, state_snapshots, speculative_max_requests or "
            "speculative_tokens (speculative_mtp_tokens), or the bits of state_dtype"
        ) from error


def make_storage(facts: Resolved, sizes: CacheSizes) -> KVStorage:
    """The pages of all layers. Raises ``ConfigError`` if they do not fit the device."""
    options, gpu, num_pages = facts.options, facts.device.torch_device, sizes.num_pages
    try:
        return KVStorage(
            facts.shape,
            num_pages=num_pages,
            page_size=options.page_size,
            dtype=facts.kv_dtype,
            device=gpu,
            scales=_kv_scales(facts),
            num_window_pages=sizes.num_window_pages,
        )
    except torch.OutOfMemoryError as error:
        num_bytes = (num_pages + 1) * _page_bytes(facts)
        if sizes.num_window_pages is not None:
            num_bytes += (sizes.num_window_pages + 1) * bytes_per_page(
                facts.shape, options.page_size, facts.kv_dtype, window_pages=True
            )
        raise ConfigError(
            f"{num_pages} KV pages of {options.page_size} positions would take "
            f"{num_bytes:,} bytes of {gpu}, which has "
            f"{facts.device.free_memory():,} free: lower "
            + ("memory_ratio" if options.num_pages is None else "num_pages")
        ) from error


def choose_host_slots(facts: Resolved) -> HostSizes:
    """How many pages, window pages and snapshots main memory keeps. If the model has recurrent
    states, they get half of it; if layers have window pages, there is room for a window for every
    ``_TOKENS_OF_WINDOW`` tokens.

    Raises ``ConfigError`` if there is no room to go on from a single page, or if the ranks of this
    machine cannot have as much now.
    """
    options, place = facts.options, facts.place
    if not options.host_cache_gib:
        return _NONE
    wanted = f"option host_cache_gib={options.host_cache_gib:g}"
    of_slots, windows = _host_slot_bytes(facts), _window_rule(facts)
    budget = int(options.host_cache_gib * 2**30) // place.size
    least = HostSizes(
        1,
        0 if windows is None else windows.span,
        0 if facts.spec.recurrent is None else 1,
    )
    num_states = 0
    if least.num_state_slots:
        num_states = budget // 2 // of_slots.num_state_slots
        budget -= num_states * of_slots.num_state_slots
    # with each window come as many pages
    num_pages = 1 if windows is None else max(1, _TOKENS_OF_WINDOW // options.page_size)
    num_units = budget / _bytes_of(least._replace(num_slots=num_pages, num_state_slots=0), of_slots)
    sizes = HostSizes(
        int(num_units * num_pages), int(num_units * least.num_window_slots), num_states
    )
    if any(number < needed for number, needed in zip(sizes, least, strict=True)):
        raise ConfigError(
            f"{wanted} has no room for a page of {options.page_size} positions and what is needed "
            f"to go on from it, which take {_bytes_of(least, of_slots) * place.size:,} bytes"
        )
    needed, free = _bytes_of(sizes, of_slots) * place.local_size, HostMemory.now().free
    if needed > free:
        raise ConfigError(
            f"{wanted} takes {needed:,} bytes of this machine's main memory, of which this process "
            f"can have {free:,}"
        )
    return sizes


def make_host_slots(
    facts: Resolved, sizes: CacheSizes, storage: KVStorage, states: StateStorage | None
) -> HostSlots | None:
    """This rank's slots of main memory; None if it keeps nothing. Raises ``ConfigError`` if they
    cannot be had."""
    kept, device = sizes.host, facts.device
    if not kept.num_slots:
        return None
    pages = window_pages = of_states = None
    try:
        if storage.page_bytes():
            pages = HostPages(storage, device, kept.num_slots)
        if kept.num_window_slots:
            window_pages = HostPages(storage, device, kept.num_window_slots, window_pages=True)
        if states is not None:
            of_states = HostStates(states, device, kept.num_state_slots)
    except (MemoryError, torch.OutOfMemoryError) as error:
        needed = _bytes_of(kept, _host_slot_bytes(facts))
        raise ConfigError(
            f"option host_cache_gib={facts.options.host_cache_gib:g}: {needed:,} bytes on this "
            f"rank: {error}"
        ) from error
    return HostSlots(pages, window_pages, of_states)


def _host_slot_bytes(facts: Resolved) -> HostSizes:
    """The bytes of a rank's slot of each kind; 0 for kinds that the model does not have."""
    recurrent, windows = facts.spec.recurrent, _window_rule(facts)
    return HostSizes(
        _page_bytes(facts),
        0 if windows is None else windows.page_bytes,
        0 if recurrent is None else _slot_bytes(facts, recurrent),
    )


def _bytes_of(sizes: HostSizes, of_slots: HostSizes) -> int:
    """The bytes of as many slots as ``sizes`` says, each of as many bytes as ``of_slots`` says."""
    return sum(number * size for number, size in zip(sizes, of_slots, strict=True))


def choose_num_snapshots(
    options: EngineOptions, slot_bytes: int, budget: int, cap_bytes: int | None
) -> int:
    """How many snapshots of ``slot_bytes`` to make: as many as the option says, or a number that
    suits the ``budget`` of bytes for pages and snapshots together."""
    if options.cache == "naive":
        return 0
    if options.state_snapshots is not None:
        return options.state_snapshots
    budget = max(0, budget)
    if cap_bytes is not None:
        budget = min(budget, cap_bytes)
    return min(4 * options.max_running_requests, budget // 4 // slot_bytes)


def _state_bytes(facts: Resolved, recurrent: RecurrentSpec, num_snapshots: int) -> int:
    """The bytes of the states of rows and of ``num_snapshots``, and of the updates that they may
    lack."""
    options, shape = facts.options, recurrent.of_rank(facts.place.size)
    rows = options.max_running_requests + 1
    num_unsettled = options.most_checks * (1 + options.most_guessed)  # tokens
    return (
        (rows + num_snapshots) * _slot_bytes(facts, recurrent)
        + rows * pending_bytes(shape)
        + num_unsettled * unsettled_bytes(shape, facts.dtype)
    )


def _slot_bytes(facts: Resolved, recurrent: RecurrentSpec) -> int:
    return bytes_per_slot(recurrent.of_rank(facts.place.size), facts.dtype, facts.state_dtype)


def _page_bytes(facts: Resolved) -> int:
    return bytes_per_page(facts.shape, facts.options.page_size, facts.kv_dtype)


def _window_rule(facts: Resolved) -> WindowRule | None:
    """None if no layers have window pages."""
    options, shape = facts.options, facts.shape
    if not shape.window_pages:
        return None
    assert shape.window is not None
    return WindowRule(
        window=shape.window,
        page_size=options.page_size,
        max_rows=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens,
        page_bytes=bytes_per_page(shape, options.page_size, facts.kv_dtype, window_pages=True),
        in_all_layers=None not in shape.windows,
    )


def _kv_scales(facts: Resolved) -> tuple[KVScale, ...] | None:
    """The scales that the checkpoint has for float8 pages; None if pages hold another type."""
    if facts.kv_dtype != torch.float8_e4m3fn or facts.options.load_format == "dummy":
        return None
    scales = read_kv_scales(facts.folder, len(facts.spec.all_layers), facts.spec.names)
    return tuple(scales[layer] for layer in facts.spec.attention_layers)
