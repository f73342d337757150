"""An engine with a fake model: every step takes the same time, and the tokens are known in advance.

Knows the real loop and planner, which it runs; only the executor is replaced. It is for measuring
everything around a model: planning, the response path, clients. ``paced_model`` makes the class
that a private model repository has in place of the shipped `llm_engine`. Must not know what is
measured around it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from minisgl_backend.build_scheduler import build_scheduler
from minisgl_backend.config import EngineOptions
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request, RequestId
from minisgl_backend.runtime import ports
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.scheduling.lookahead import Lookahead
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.text.tokenizer_files import check_tokenizer, understood
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_bench.journal import Entry, What
from minisgl_kit.wrappers import SchedulerWrapper

_TEXT: Final = (
    "The quick brown fox jumps over the lazy dog. Straße, café, naïve, 東京, こんにちは, 🙂👍🏽. "
    "Paris is the capital of France; 1 + 2 = 3, and 10 - 4 = 6.\n"
)


class _Paced:
    """A step that ends at a given time."""

    def __init__(self, token_ids: IntArray, due_s: float) -> None:
        self._token_ids = token_ids
        self._due_s = due_s

    def masks(self, num_masks: int) -> IntArray:
        """Tokens are made up, so masks say nothing."""
        return np.empty((num_masks, 0), np.int32)

    def mask(self, samples: IntArray) -> None:
        pass

    def tokens(self) -> SampledTokens:
        time.sleep(max(0.0, self._due_s - time.monotonic()))
        return SampledTokens(self._token_ids)


class PacedExecutor:
    """Samples the token of ``script`` at each row's position; a step takes ``step_s`` seconds."""

    def __init__(self, script: IntArray, *, step_s: float) -> None:
        self._script = script
        self._step_s = step_s
        self._due_s = 0.0
        self._prompts: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> _Paced:
        """Enqueue a step behind the last one."""
        for admission in plan.admissions:
            self._prompts[admission.row] = admission.num_prompt_tokens
        starts = [self._prompts[row] for row in plan.sample_rows.tolist()]
        # indices of the tokens that are sampled, counted from the end of the row's prompt
        indices = plan.sample_positions - np.array(starts, dtype=np.int64)
        # steps end on a regular beat, so that planning does not lengthen them
        now_s = time.monotonic()
        if self._due_s + self._step_s < now_s:
            self._due_s = now_s
        self._due_s += self._step_s
        return _Paced(self._script[indices % len(self._script)], self._due_s)

    def renew(self) -> None:
        """Does nothing: no step breaks."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""


def script_of(model: str, text: str = _TEXT) -> IntArray:
    """The tokens of ``text``, which a paced engine repeats, by a model's tokenizer; special tokens
    may be among them."""
    return _encoded(_tokenizer(model), text)


def _tokenizer(model: str) -> Tokenizer:
    """Not by ``load_tokenizer``, whose library takes a second to import: the text is our own."""
    check_tokenizer(model)
    with understood(model):
        return Tokenizer.from_file(str(Path(model) / "tokenizer.json"))


def _encoded(tokenizer: Tokenizer, text: str) -> IntArray:
    return np.array(tokenizer.encode(text).ids, np.int32)


def paced_engine(
    options: EngineOptions, *, step_s: float, text: str = _TEXT, parts: Parts = STANDARD
) -> Engine:
    """An engine that says ``text`` again and again, at ``step_s`` seconds per step."""
    tokenizer = _tokenizer(options.model)
    script = _encoded(tokenizer, text)
    info = EngineInfo(
        model=options.model,
        folder="",
        architecture="paced",
        device="none",
        dtype="none",
        weights="plain",
        attention_backend="none",
        vocab_size=len(Vocabulary.of(tokenizer)),
        eos_token_ids=(),
        max_sequence_length=options.max_sequence_length or 8192,
        page_size=options.page_size,
        num_pages=options.num_pages or 2**18,
        max_running_requests=options.max_running_requests,
        max_queued_requests=options.max_queued_requests,
        max_queued_tokens=options.max_queued_tokens,
        max_queue_time_s=options.max_queue_time_s,
    )
    scheduler = build_scheduler(options, info, parts)
    executor = parts.executor(PacedExecutor(script, step_s=step_s))
    return parts.engine(info, scheduler, executor, overlap=options.overlap)


def paced_model(*, step_s: float, text: str = _TEXT, journal: Path | None = None) -> type[Any]:
    """The class for model.py of an `llm_engine` with a paced engine.

    Its planner writes its actions to the file ``journal``.
    """
    from minisgl_backend.tritonserver.llm_engine import TritonPythonModel

    parts = STANDARD if journal is None else journaled(journal)

    class PacedModel(TritonPythonModel):
        @staticmethod
        def make_engine(options: EngineOptions) -> Engine:
            return paced_engine(options, step_s=step_s, text=text, parts=parts)

    return PacedModel


def journaled(path: Path) -> Parts:
    """The parts of an engine whose planner keeps a journal."""
    return Parts(scheduler=lambda cache, config: JournaledScheduler(Scheduler(cache, config), path))


class JournaledScheduler(SchedulerWrapper):
    """A planner that keeps a journal; only the engine's thread calls it."""

    def __init__(self, scheduler: ports.Scheduler, path: Path) -> None:
        super().__init__(scheduler)
        self._path = path

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        super().add(request, generated, num_scored)
        self._note("added", [request.id])

    def abort(self, request_id: RequestId) -> bool:
        was_live = super().abort(request_id)
        self._note("aborted", [request_id] if was_live else [])
        return was_live

    def plan(self, lookahead: Lookahead | None = None) -> StepPlan | None:
        plan = super().plan(lookahead)
        if plan is not None and plan.admissions:
            self._note("admitted", [admission.request_id for admission in plan.admissions])
        return plan

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        result = super().commit(plan, tokens)
        self._note("sampled", result.request_ids)
        return result

    def _note(self, what: What, request_ids: Iterable[int]) -> None:
        stats = self.stats()
        entry = Entry(
            time.monotonic(), what, list(request_ids), stats.num_running, stats.used_pages
        )
        entry.append_to(self._path)
