"""The start of several replicas: which GPUs or processor cores each gets, and their processes.

Must not know requests, or how one is routed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from minisgl_backend.adapter_options import adapter_paths
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, InvalidRequest, Recovering
from minisgl_backend.model_check import checked_spec
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.precheck import check_options
from minisgl_backend.replicas.process import ReplicaPlace, ReplicaProcess
from minisgl_backend.replicas.replicated_engine import ReplicatedEngine
from minisgl_backend.resolve import device_kind
from minisgl_backend.runtime.engine_base import EngineInfo

_GPUS: Final = "CUDA_VISIBLE_DEVICES"


def start_replicas(options: EngineOptions, module: str) -> ReplicatedEngine:
    """Load ``options.data_parallel_size`` replicas, all at the same time, as processes of
    ``module``. Raises ``ConfigError`` if one cannot start, with its cause."""
    number, ranks = options.data_parallel_size, options.tensor_parallel_size
    device = device_kind(options, number * ranks)
    check_options(options, device)
    folder = resolve_model(options.model, options.model_source)
    checked_spec(options, folder, device)
    own = _of_replica(options, folder, device)
    places = (
        gpu_places(number, ranks, os.environ)
        if device == "cuda"
        else cpu_places(number, sorted(os.sched_getaffinity(0)))
    )
    command = (sys.executable, "-m", module)
    replicas = [
        ReplicaProcess(index, command, place, asdict(own)) for index, place in enumerate(places)
    ]
    with ExitStack() as unless_started:
        unless_started.callback(_end_all, replicas)
        engine = ReplicatedEngine(_start_all(replicas), replicas, options)
        for replica in replicas:
            replica.serve(engine)
        try:
            for name, path in adapter_paths(options).items():
                engine.adapters.load(name, path)
        except (InvalidRequest, Recovering) as error:
            raise ConfigError(str(error)) from error
        unless_started.pop_all()
    return engine


def _of_replica(options: EngineOptions, folder: Path, device: str) -> EngineOptions:
    """The options that each replica gets."""
    layer_folder = options.speculative_mtp_model
    if layer_folder is not None:
        layer_folder = str(resolve_model(layer_folder, options.model_source))
    return replace(
        options,
        # the replicas use the folders and the device that were chosen here
        model=str(folder),
        speculative_mtp_model=layer_folder,
        device=device,
        # the parent keeps the limits of the queue, whichever replica a request waits at
        max_queued_requests=(options.data_parallel_size - 1) * options.max_running_requests
        + options.max_queued_requests,
        max_queued_tokens=sys.maxsize,
        # the parent tells them which adapters there are
        multi_lora=None,
        lora_modules=None,
    )


def _start_all(replicas: Sequence[ReplicaProcess]) -> list[EngineInfo]:
    """Start the processes, and wait until all have loaded the model. Raises ``ConfigError`` as soon
    as one cannot."""
    infos = []
    for replica in replicas:
        replica.start()
    done, _ = wait([replica.started for replica in replicas], return_when=FIRST_EXCEPTION)
    for replica in replicas:
        if replica.started in done:
            try:
                infos.append(replica.started.result())
            except ConfigError as error:
                raise ConfigError(f"replica {replica.number}: {error}") from None
    return infos


def _end_all(replicas: Sequence[ReplicaProcess]) -> None:
    """End processes, some of which may not have started yet."""
    for replica in replicas:
        replica.stop()
        replica.kill()
    for replica in replicas:
        replica.close()


def gpu_places(number: int, ranks: int, environment: Mapping[str, str]) -> list[ReplicaPlace]:
    """A GPU for each rank of each replica, in the order in which this process sees them."""
    seen = environment.get(_GPUS, "").split(",")
    names = seen if seen != [""] else [str(index) for index in range(number * ranks)]
    return [
        ReplicaPlace(environment={_GPUS: ",".join(names[index * ranks : (index + 1) * ranks])})
        for index in range(number)
    ]


def cpu_places(number: int, cores: Sequence[int]) -> list[ReplicaPlace]:
    """Processor cores for each replica, neighbours together. If there are fewer cores than
    replicas, they are shared."""
    share = max(1, len(cores) // number)
    return [
        ReplicaPlace(
            environment={},
            cores=frozenset(cores[(index * share + i) % len(cores)] for i in range(share)),
        )
        for index in range(number)
    ]
