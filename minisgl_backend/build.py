"""The composition root: from options to a running engine.

Chooses the concrete classes of planner, executor and ranks; all other modules are given what they
need. Options are checked first (``resolve``), before anything is loaded or started. One rank's part
is put together in ``build_rank``.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch._C._distributed_c10d import Store

from minisgl_backend.build_rank import Rank, build_rank
from minisgl_backend.cache.kv import KVCache, NaiveCache, RadixCache
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError
from minisgl_backend.execution.followers import Followers
from minisgl_backend.execution.ranks import LeadingExecutor
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.parallel.connect import connect, open_store
from minisgl_backend.parallel.group import Group, OneRank
from minisgl_backend.parallel.place import Place
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.resolve import Resolved, resolve
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.runtime.ports import Executor, Scheduler
from minisgl_backend.scheduling.scheduler import SchedulerConfig
from minisgl_backend.text.tokenizer import load_definition

logger = logging.getLogger(__name__)


def build_engine(options: EngineOptions, parts: Parts = STANDARD) -> Engine:
    """Load the model and start the engine. ``ConfigError`` says what the operator can correct."""
    info, executor = build_executor(options, parts)
    logger.info("engine: %s", info)
    num_positions = info.num_pages * info.page_size
    if num_positions + 1 < info.max_sequence_length:  # a last token needs no position
        logger.warning(
            "the KV pages hold %d tokens, the context has %d: requests must fit the pages",
            num_positions,
            info.max_sequence_length,
        )
    scheduler = build_scheduler(options, info, parts)
    grammars = build_grammars(options, info)
    engine = parts.engine(info, scheduler, executor, overlap=options.overlap, grammars=grammars)
    if isinstance(executor, LeadingExecutor):
        executor.on_lost(engine.fail)
    return engine


def build_executor(options: EngineOptions, parts: Parts = STANDARD) -> tuple[EngineInfo, Executor]:
    """Load the model onto its devices, and allocate pages for its keys and values.

    With tensor parallelism this process is rank 0, and the executor owns the processes of the other
    ranks. Raises ``ConfigError``.
    """
    place = Place.first(options.tensor_parallel_size, options.distributed_address)
    facts = resolve(options, place)
    if place.size > 1:
        return _lead(facts, parts)
    rank = build_rank(facts, OneRank, lambda: None, parts)
    return rank.info, rank.executor


def build_scheduler(options: EngineOptions, info: EngineInfo, parts: Parts = STANDARD) -> Scheduler:
    """The planner for an engine with this model and this number of pages."""
    cache_class = RadixCache if options.cache == "radix" else NaiveCache
    cache: KVCache = cache_class(info.num_pages, info.page_size)
    config = SchedulerConfig(
        max_running_requests=options.max_running_requests,
        max_prefill_tokens=options.max_prefill_tokens,
        policy=options.schedule_policy,
    )
    return parts.scheduler(cache, config)


def build_grammars(options: EngineOptions, info: EngineInfo) -> Grammars | None:
    """None if requests may bring no grammars: by option, or since there is no tokenizer."""
    if not (options.structured_outputs and (Path(info.folder) / "tokenizer.json").is_file()):
        return None
    return Grammars(
        partial(load_definition, info.folder),
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )


def build_follower(
    options: EngineOptions, place: Place, meet: Callable[[], None], parts: Parts = STANDARD
) -> Rank:
    """The part of a rank other than 0, in the rank's own process."""
    facts = resolve(options, place)
    # before the ranks meet, since it may take seconds
    _, store = open_store(place, options.distributed_timeout_s)
    return build_rank(facts, lambda: _connect(facts, store), meet, parts)


def _lead(facts: Resolved, parts: Parts) -> tuple[EngineInfo, Executor]:
    """Start the processes of the other ranks, and build rank 0 together with them."""
    options, timeout_s = facts.options, facts.options.distributed_timeout_s
    place, store = open_store(facts.place, timeout_s)
    # the other ranks take the folder that this rank has fetched, and the library it has chosen
    told = replace(options, model=str(facts.folder), comm=facts.comm)
    command = (sys.executable, "-m", parts.follower)
    followers = Followers(place, command, json.dumps(asdict(told)).encode())

    groups: list[Group] = []

    def join() -> Group:
        group = _connect(facts, store)
        groups.append(group)
        followers.on_lost(lambda failure: group.leave())  # else a collective might never return
        return group

    try:
        rank = build_rank(facts, join, followers.meet, parts)
        leader = LeadingExecutor(
            rank.executor,
            rank.group,
            followers,
            timeout_s=timeout_s,
            # gloo ends collectives that wait for too long, NCCL does not
            steps_may_hang=facts.comm != "gloo",
        )
    except BaseException as error:
        report = followers.report()
        followers.close(patience_s=0)
        for group in groups:
            group.leave()
        if report is not None and not isinstance(error, ConfigError):
            raise ConfigError(report) from error
        raise
    logger.info("%d tensor-parallel ranks, processes %s", place.size, followers.pids)
    return rank.info, leader


def _connect(facts: Resolved, store: Store) -> Group:
    timeout_s = facts.options.distributed_timeout_s
    device = facts.device.torch_device
    return connect(facts.place, store, facts.comm, device, timeout_s=timeout_s)
