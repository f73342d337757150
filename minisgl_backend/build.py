"""The composition root: from options to a running engine.

Options are checked (``resolve``) before anything is loaded or started. ``build_scheduler`` makes
the planner, ``build_rank`` the part of one rank; ``tensor_parallel`` starts several ranks, and
``replicas.start`` several replicas. Must not know tensors, nor who submits requests: Triton's
models and ``LLM`` build the same engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from minisgl_backend.adapter_options import adapter_paths, adapter_tasks, check_task_names
from minisgl_backend.build_rank import build_rank
from minisgl_backend.build_scheduler import build_scheduler
from minisgl_backend.cache.tree_watch import TreeWatch
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError, InvalidRequest
from minisgl_backend.execution.adapters import AdapterStore
from minisgl_backend.execution.ranks import LeadingExecutor
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.models.hub import resolve_tokenizer
from minisgl_backend.models.recommended_sampling import recommended_sampling
from minisgl_backend.parallel.group import OneRank
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.precheck import first_place
from minisgl_backend.replicas.start import start_replicas
from minisgl_backend.request import TokenId
from minisgl_backend.resolve import Resolved, resolve
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineBase, EngineInfo
from minisgl_backend.runtime.ports import Executor
from minisgl_backend.tensor_parallel import lead
from minisgl_backend.text.tokenizer_files import load_definition

logger = logging.getLogger(__name__)

_READ_AT_ONCE: Final = 32_000
"""A tokenizer with at most this many tokens is read for grammars only when the first one comes."""


def build_engine(options: EngineOptions, parts: Parts = STANDARD) -> EngineBase:
    """Load the model and start the engine, or the replicas that ``options`` ask for.

    Raises ``ConfigError``, which says what the operator can correct.
    """
    check_task_names(options)
    if options.data_parallel_size > 1:
        return start_replicas(options, parts.replica)
    return build_engine_alone(options, parts)


def build_engine_alone(
    options: EngineOptions,
    parts: Parts,
    *,
    watch: TreeWatch | None = None,
    host_watch: TreeWatch | None = None,
) -> Engine:
    """One engine, whatever ``options`` say about replicas; ``watch`` follows its prefix cache, and
    ``host_watch`` the prefixes in main memory."""
    facts = _resolved(options)
    spec, folder = facts.spec, facts.folder
    if recommended := recommended_sampling(folder):
        follow = options.sampling_defaults == "model"
        logger.info(
            "generation_config.json recommends %s: %s",
            ", ".join(f"{name}={value}" for name, value in recommended.items()),
            "so requests have it by default"
            if follow
            else "requests have it only if they say so, or with sampling_defaults=model",
        )
    if options.tokenizer is not None:
        folder = resolve_tokenizer(options.tokenizer, options.model_source)
    grammars = build_grammars(options, folder, spec.vocab_size, sorted(spec.eos_token_ids))
    try:
        return _engine_of(facts, parts, grammars, watch, host_watch)
    except BaseException:
        if grammars is not None:
            grammars.close()
        raise


def _engine_of(
    facts: Resolved,
    parts: Parts,
    grammars: Grammars | None,
    watch: TreeWatch | None,
    host_watch: TreeWatch | None,
) -> Engine:
    options = facts.options
    info, executor, store = _build_executor(facts, parts)
    logger.info("engine: %s", info)
    num_positions = info.num_pages * info.page_size
    if num_positions + 1 < info.max_sequence_length:  # a last token needs no position
        logger.warning(
            "the KV pages hold %d tokens, the context has %d: requests must fit the pages",
            num_positions,
            info.max_sequence_length,
        )
    with ExitStack() as unless_built:
        unless_built.callback(executor.close)
        scheduler = build_scheduler(options, info, parts, watch=watch, host_watch=host_watch)
        adapters = build_adapters(options, store)
        if adapters is not None:
            unless_built.callback(adapters.close)
        if grammars is not None:
            grammars.wait_until_prepared()  # else the first steps would wait for it now and then
        engine = parts.engine(
            info, scheduler, executor, overlap=options.overlap, grammars=grammars, adapters=adapters
        )
        unless_built.pop_all()
    if isinstance(executor, LeadingExecutor):
        executor.on_lost(engine.fail)
    return engine


def build_executor(options: EngineOptions, parts: Parts = STANDARD) -> tuple[EngineInfo, Executor]:
    """Load the model onto its devices, and allocate pages for its keys and values.

    With tensor parallelism this process is rank 0, and the executor owns the processes of the other
    ranks. Raises ``ConfigError``.
    """
    info, executor, _ = _build_executor(_resolved(options), parts)
    return info, executor


def _resolved(options: EngineOptions) -> Resolved:
    """The facts of the leading rank."""
    if options.node_rank:
        raise ConfigError(
            f"option node_rank={options.node_rank}: this machine follows node 0, which has the "
            "engine; minisgl serve starts its ranks"
        )
    return resolve(options, first_place(options))


def _build_executor(
    facts: Resolved, parts: Parts
) -> tuple[EngineInfo, Executor, AdapterStore | None]:
    """Like ``build_executor``, with the store of adapters if requests may name any."""
    if facts.place.size > 1:
        return lead(facts, parts)
    rank = build_rank(facts, OneRank, lambda: None, parts)
    return rank.info, rank.executor, rank.adapters


def build_adapters(options: EngineOptions, store: AdapterStore | None) -> Adapters | None:
    """The adapters that requests may name, with those of the options; None without a ``store``.

    Raises ``ConfigError`` for one that does not fit the model.
    """
    if store is None:
        return None
    most = options.max_cpu_loras or 2 * options.max_loras
    adapters = Adapters(store, most_in_memory=most, tasks=adapter_tasks(options))
    with ExitStack() as unless_loaded:
        unless_loaded.callback(adapters.close)
        try:
            for name, path in adapter_paths(options).items():
                adapters.load(name, path)
        except InvalidRequest as error:
            raise ConfigError(str(error)) from error
        unless_loaded.pop_all()
    return adapters


def build_grammars(
    options: EngineOptions, folder: Path, vocab_size: int, eos_token_ids: Sequence[TokenId]
) -> Grammars | None:
    """An engine's grammars, with the tokenizer in ``folder``; None if requests may not bring any,
    because an option says so or there is no tokenizer.

    If the tokenizer is large, a thread begins to read it now. Call this before weights are loaded,
    since reading keeps other Python threads from running.
    """
    if not (options.structured_outputs and (folder / "tokenizer.json").is_file()):
        return None
    grammars = Grammars(
        partial(load_definition, str(folder), num_embeddings=vocab_size),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )
    if vocab_size > _READ_AT_ONCE:
        grammars.prepare()
    return grammars
