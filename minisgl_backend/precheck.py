"""Checks of the options before anything starts.

Knows options and this machine. Must not import torch, so that a command can report in a second what
the engine would find half a minute later. The engine makes the same checks (``resolve``), those of
the model (``model_check``), and then those that need the device.
"""

from __future__ import annotations

import ctypes
from typing import Final

from minisgl_backend.adapter_options import check_adapters
from minisgl_backend.attention.names import parse_names
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.graph_sizes import check_graph_options
from minisgl_backend.host_memory import HostMemory
from minisgl_backend.parallel.nodes import check_nodes
from minisgl_backend.parallel.place import RankPlace, check_comm
from minisgl_backend.parallel.rendezvous import listen_at

_LEAST_FOR_GUESSES: Final = 4
_DEFAULTS: Final = EngineOptions()


def device_type(options: EngineOptions) -> str | None:
    """``cpu`` or ``cuda``, or None if only torch can tell.

    Raises ``ConfigError`` if options ask for a GPU and this machine has no driver for one.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
        has_driver = True
    except OSError:
        has_driver = False
    if options.device == "cuda" and not has_driver:
        raise ConfigError("device cuda needs an NVIDIA GPU, and this machine has no driver for one")
    return options.device or (None if has_driver else "cpu")


def check_meeting_point(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if the ranks could not meet at ``rendezvous`` now."""
    if options.rendezvous is not None:
        listen_at(first_place(options)).close()


def first_place(options: EngineOptions) -> RankPlace:
    """The place of rank 0. Raises ``ConfigError``."""
    return RankPlace.first(options.tensor_parallel_size, options.rendezvous, options.nnodes or 1)


def check_options(options: EngineOptions, device: str | None) -> None:
    """Raise ``ConfigError`` if options contradict each other or do not work on the device."""
    check_nodes(options)
    if options.tensor_parallel_size % (options.nnodes or 1):
        raise ConfigError(
            f"tensor_parallel_size={options.tensor_parallel_size} must be a multiple of "
            f"nnodes={options.nnodes}: all nodes have the same number of ranks"
        )
    place = first_place(options)
    if options.tensor_parallel_size == 1:
        for name in ("comm", "rendezvous", "expert_parallel"):
            if getattr(options, name):
                raise ConfigError(f"option {name} is for tensor_parallel_size of 2 and more")
        if options.distributed_timeout_s != _DEFAULTS.distributed_timeout_s:
            raise ConfigError(
                "option distributed_timeout_s is for tensor_parallel_size of 2 and more"
            )
    if options.cache == "naive":
        for name, value in (
            ("group_attention", options.group_attention and "true"),
            ("schedule_policy", options.schedule_policy == "lpm" and "lpm"),
            ("state_snapshots", options.state_snapshots),
            ("host_cache_gib", options.host_cache_gib and f"{options.host_cache_gib:g}"),
            ("max_overtaken", options.max_overtaken),
        ):
            if value:
                raise ConfigError(f"option {name}={value} needs cache=radix")
    _check_host_cache(options)
    _check_replicas(options)
    check_adapters(options)
    _check_guesses(options)
    if device is not None:
        check_comm(options.comm, device, place)
    if options.batch_invariant:
        _check_batch_invariant(options)
    if device == "cuda":
        _check_on_gpu(options)
    if device == "cpu":
        _check_on_cpu(options)


def _check_guesses(options: EngineOptions) -> None:
    for name in ("speculative_tokens", "speculative_mtp_tokens"):
        value = getattr(options, name)
        if value and options.max_prefill_tokens < _LEAST_FOR_GUESSES:
            raise ConfigError(
                f"option {name}={value} needs max_prefill_tokens of at least "
                f"{_LEAST_FOR_GUESSES}: a token and its guesses have half of a step"
            )
    if options.speculative_mtp_model is not None and not options.speculative_mtp_tokens:
        raise ConfigError("option speculative_mtp_model needs speculative_mtp_tokens of at least 1")
    most, recent = options.speculative_max_requests, options.speculative_recent_tokens
    if most != _DEFAULTS.speculative_max_requests and not options.most_guessed:
        raise ConfigError(
            f"option speculative_max_requests={most} needs speculative_tokens or "
            "speculative_mtp_tokens of at least 1"
        )
    is_chosen = recent not in (0, _DEFAULTS.speculative_recent_tokens)  # 0: look nothing up
    if is_chosen and not options.speculative_tokens:
        raise ConfigError(
            f"option speculative_recent_tokens={recent} needs speculative_tokens of at least 1"
        )


def _check_host_cache(options: EngineOptions) -> None:
    """Compares with all memory of the machine, or of its container; what is free is compared when
    it is taken."""
    replicas, num_nodes = options.data_parallel_size, options.nnodes or 1
    if not options.host_cache_gib:
        return
    needed, total = options.host_cache_gib * 2**30 * replicas / num_nodes, HostMemory.now().total
    if needed > total:
        raise ConfigError(
            f"option host_cache_gib={options.host_cache_gib:g} would take {needed:,.0f} bytes of "
            f"main memory, and this process may use {total:,}"
        )


def _check_replicas(options: EngineOptions) -> None:
    if options.data_parallel_size == 1:
        for name in ("routing_ratio", "routing_slack"):
            if getattr(options, name) is not None:
                raise ConfigError(f"option {name} is for data_parallel_size of 2 and more")
    elif options.rendezvous is not None:
        raise ConfigError(
            "option rendezvous does not go with data_parallel_size of 2 and more: the "
            "ranks of each replica meet at a port of their own"
        )
    elif options.cache == "naive":
        raise ConfigError(
            "option cache=naive does not go with data_parallel_size of 2 and more: requests are "
            "routed by what the replicas have cached"
        )


def _check_on_gpu(options: EngineOptions) -> None:
    if options.dtype == "float64":
        raise ConfigError("option dtype=float64 is for CPUs")
    # computing experts one by one waits for the device, which cannot be captured
    if options.moe_backend == "torch" and options.cuda_graph_max_batch_size != 0:
        raise ConfigError("option moe_backend=torch on a GPU needs cuda_graph_max_batch_size=0")
    if options.attention_backend is not None:
        parse_names(options.attention_backend)
    check_graph_options(options)


def _check_on_cpu(options: EngineOptions) -> None:
    for_gpus = {
        "attention_backend": options.attention_backend not in (None, "sdpa", "sdpa,sdpa"),
        "moe_backend": options.moe_backend not in (None, "torch"),
        "batch_invariant": options.batch_invariant,
        "cuda_graph_max_batch_size": bool(options.cuda_graph_max_batch_size),
        "cuda_graph_batch_sizes": options.cuda_graph_batch_sizes is not None,
        "cuda_graph_max_tokens": bool(options.cuda_graph_max_tokens),
    }
    for name, is_given in for_gpus.items():
        if is_given:
            raise ConfigError(f"option {name}={getattr(options, name)} needs a GPU")


def _check_batch_invariant(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if an option asks for kernels whose sums depend, or may depend, on the
    batch."""
    asked = {
        "dtype": options.dtype not in (None, "bfloat16"),
        "quantization": options.quantization is not None,
        "tensor_parallel_size": options.tensor_parallel_size > 1,
        "attention_backend": options.attention_backend is not None,
        "moe_backend": options.moe_backend == "torch",
        "group_attention": bool(options.group_attention),
        "enable_lora": options.enable_lora,
    }
    for name, is_given in asked.items():
        if is_given:
            value = getattr(options, name)
            raise ConfigError(f"option batch_invariant does not go with {name}={value}")
