"""Runs plans on a device: one forward pass for each, and tokens for the rows that get some.

All state that outlives a step is on the device, by row or page (``rows``, ``storage``), so a step
is queued without knowing the tokens of the previous one. Everything runs in the order of the
device's queue. If the device has graphs, decode steps are captured as a whole, and steps that check
guesses run as such if they can (``checks``). Of other steps, up to a certain number of tokens, only
the layers are captured.

Must not know waiting requests, the cache, or why rows and pages are granted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import numpy as np
from torch import Tensor

from minisgl_backend.attention.base import PagedAttention
from minisgl_backend.device.base import Device, HostArray, Submission
from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.adapters import AdapterStore, RowAdapters
from minisgl_backend.execution.checks import are_decoded, as_decodes, lengths_as_decodes
from minisgl_backend.execution.embeddings import Embeddings
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.graph_sizes import batch_sizes
from minisgl_backend.execution.host_slots import HostSlots
from minisgl_backend.execution.launched import HostOutput, LaunchedStep, MaskedStep
from minisgl_backend.execution.mtp import GuessesOnHost
from minisgl_backend.execution.prompt_logprobs import ScoredChunks
from minisgl_backend.execution.sampling import StepOutput
from minisgl_backend.execution.stages import ExecutorLimits, Stages, WatchLogits
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.execution.step_graphs import StepGraphs, capture_steps, take_groups_of
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.execution.unsettled import Due, UnsettledStep
from minisgl_backend.execution.warm_up import WarmUp
from minisgl_backend.kernels.settle import Settling
from minisgl_backend.models.adapter_slots import AdapterSlots
from minisgl_backend.models.decoder import Decoder, LayersOutput
from minisgl_backend.plan import Copies, Draws, Pending, StepPlan
from minisgl_backend.progress import Progress
from minisgl_backend.request import IntArray

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ModelExecutor:
    """A model, its pages and its rows on one device (``RankExecutor``).

    Rows are numbered 0 .. max_rows - 1, pages 0 .. storage.num_pages - 1. On a GPU, tensors that
    are passed in must be ready in the order of the device's queue (``CudaDevice.catch_up``).
    """

    def __init__(
        self,
        model: Decoder,
        *,
        storage: KVStorage,
        states: StateStorage | None,
        attention: PagedAttention,
        device: Device,
        limits: ExecutorLimits,
        adapter_slots: AdapterSlots | None,
        adapter_store: AdapterStore | None,
        watch_logits: WatchLogits | None,
        progress: Progress,
        host_slots: HostSlots | None = None,
    ):
        """``states`` is given if the model has recurrent layers, ``adapter_slots`` if it takes
        adapters; ``adapter_store`` is rank 0's. With ``host_slots`` plans copy pages of
        ``storage``, and snapshots of ``states``, to and from main memory.

        Raises ``ConfigError`` if the remaining memory cannot hold both the graphs and a step of
        ``max_prefill_tokens``."""
        self.device = device
        self.graphs = StepGraphs()
        self.adapter_graphs = StepGraphs()
        self._storage = storage
        self._host_slots = host_slots
        self._states = states
        self._group = model.group
        self._adapters: RowAdapters | None = None
        if adapter_slots is not None:
            self._adapters = RowAdapters(
                adapter_slots,
                device,
                model.group,
                num_rows=limits.max_rows + 1,
                store=adapter_store,
            )
        self._is_broken = False
        self._unmasked: MaskedStep | None = None
        self._guesses = GuessesOnHost()
        self._has_sampled = False  # in the step that the device is at
        self.stages = device.submit(
            lambda: Stages(
                model,
                storage,
                attention,
                device,
                limits,
                states=states,
                adapters=self._adapters,
                watch_logits=watch_logits,
            )
        ).result()
        if not device.is_host:
            device.submit(partial(self._compile_and_capture, progress)).result()

    def launch(self, plan: StepPlan) -> Pending:
        """Queue the step. Errors raise here, or in ``tokens`` of the result."""
        if plan.assumes_right:
            raise InvariantError("a step is launched before it is known where its rows go on")
        if self._unmasked is not None and self._unmasked.waits:
            raise InvariantError("a step is launched while the one before it waits for masks")
        self._unmasked = None
        loaded = [] if self._adapters is None else self._adapters.held(plan.adapters)
        checked = self._guesses.checked(plan.checks)
        guess = partial(self._guess, plan.mtp_rows) if len(plan.mtp_rows) else None
        if len(plan.masked_rows):
            self._unmasked = MaskedStep(
                lambda: self._begin(plan, loaded),
                self.stages.sampler,
                self._submit,
                checked=checked,
                guess=guess,
                reported=plan.reported,
            )
            return self._unmasked
        step = LaunchedStep(self._submit(lambda: self._begin(plan, loaded)()), checked)
        if guess is not None:
            guess()
        return step

    def renew(self) -> None:
        """Run steps again after one that broke. ``ranks`` calls this on all ranks together."""
        self._is_broken = False

    def close(self) -> None:
        """Wait for the steps in the queue, then destroy the graphs. Idempotent."""
        self.device.close()
        self.graphs.close()
        self.adapter_graphs.close()
        if self.stages.mtp is not None:
            self.stages.mtp.close()

    def mark(self, mark: Callable[[str], AbstractContextManager[object]]) -> None:
        """Put ``mark``, such as a profiler's range, around each layer, the head, sampling and the
        scoring of prompts, except when they are replayed."""
        self.stages.model.mark = self.stages.mark = mark

    # --- in the device's queue --------------------------------------------------------------------

    def _submit(self, part: Callable[[], T]) -> Submission[T]:
        """Queue a part of a step. With several ranks, after a part that broke, refuse all others
        until ``renew``.

        Other ranks may still be in the middle of the broken step. Their sums of that step would be
        mixed with this rank's sums of the next.
        """

        def run() -> T:
            if self._is_broken:
                raise InvariantError("a step before this one broke")
            try:
                return part()
            except Exception:
                self._is_broken = self._group.size > 1
                raise

        return self.device.submit(run)

    def _begin(self, plan: StepPlan, loaded: list[Tensor]) -> Callable[[], HostOutput]:
        """Queue a step up to its logits, and return a function that queues the rest.

        No other step may be queued in between. ``loaded`` are the adapters that the step loads, on
        rank 0. Unless rows wait for masks, the second function queues a captured step as a whole.
        """
        stages, self._has_sampled = self.stages, False
        self._write(plan, loaded)
        grants = stages.rows.lines_of(plan.grants, plan.window_grants)
        all_logits = self._group.size == 1 or stages.sampler.need_all_logits(plan.sample_rows)
        decodes, tokens, groups = as_decodes(plan)
        graphs = self._graphs_for(decodes.rows).decode
        most_read_again = stages.attention.most_read_again
        is_decode = not len(plan.chunks.rows) and are_decoded(plan.checks, most_read_again)
        if is_decode and graphs and graphs.fits(len(decodes.rows)):
            if grants.shape[1] > graphs.max_grants:
                stages.rows.grant(grants)
                grants = grants[:, :0]
            unsettled = self._unsettled_step(plan)
            if len(plan.masked_rows):
                finish = graphs.begin(decodes, tokens, grants, unsettled=unsettled)
                self._keep_unsettled(plan)
                return partial(self._finish, plan, finish)

            def replay() -> StepOutput:
                output = graphs.replay(
                    decodes, tokens, grants, groups, unsettled=unsettled, all_logits=all_logits
                )
                self._keep_unsettled(plan)
                return output

            return partial(self._finish, plan, replay)
        stages.rows.grant(grants)
        if self._states is not None:
            self._settle_and_keep(self._states, plan, self._states.take_due(plan))
        batch = FlatBatch.of(plan)
        output = self._layers(batch)
        hidden = output.residual
        sample = partial(stages.sample, stages.logits_of(batch, output), all_logits=all_logits)
        embedded = stages.embedder.embedded(hidden, batch)
        if not len(plan.scores.chunks):
            return partial(self._finish, plan, sample, embedded=embedded)
        offsets = batch.chunk_offsets[batch.num_checks :]
        score = partial(stages.scorer.scored, hidden, plan.scores, plan.chunks, offsets)
        return partial(self._finish, plan, sample, score, embedded)

    def _guess(self, rows: IntArray) -> Submission[Tensor]:
        """Queue the MTP layer's guesses for ``rows``, by themselves: the planner goes on with what
        was sampled while they are made."""
        mtp = self.stages.mtp
        assert mtp is not None

        def guess() -> Tensor:
            if not self._has_sampled:
                raise InvariantError("the step broke before it could sample")
            try:
                return self.device.download(mtp.guess(rows))
            except Exception:  # which nothing else shows, unless the guesses are checked
                logger.exception("the MTP layer could not guess")
                raise

        guesses = self._submit(guess)
        self._guesses.put(rows, guesses)
        return guesses

    def _write(self, plan: StepPlan, loaded: list[Tensor]) -> None:
        """Queue everything that a plan does before anything is computed, except grants and what
        it does to states."""
        if not plan.host_saves.is_empty:
            self._slots_of_host().save(plan.host_saves)
        if len(plan.broken_pages):
            self._storage.clear(self.device.upload(plan.broken_pages.astype(np.int64)))
        if len(plan.broken_window_pages):
            broken = self.device.upload(plan.broken_window_pages.astype(np.int64))
            self._storage.clear(broken, window_pages=True)
        if self._adapters is not None:
            self._adapters.take(plan.adapters, loaded)
        if not plan.host_loads.is_empty:
            self._slots_of_host().load(plan.host_loads)
        if len(plan.copies.sources):
            slots = _copied_slots(plan.copies, self._storage.page_size)
            self._storage.copy(*self.device.upload(slots))
        if plan.admissions:
            self.stages.admit(plan.admissions)
        if self._group.size > 1:
            self.stages.sampler.learn(Draws.of(plan.admissions) if plan.admissions else plan.draws)

    def _slots_of_host(self) -> HostSlots:
        if self._host_slots is None:
            raise InvariantError("a plan copies to or from main memory, which keeps nothing")
        return self._host_slots

    def _unsettled_step(self, plan: StepPlan) -> UnsettledStep | None:
        """What the graph of a decode step does to recurrent states if there are guesses. If not,
        what the plan does to states first is queued here."""
        if self._states is None:
            return None
        due = self._states.take_due(plan)
        if len(plan.checks.rows):
            return UnsettledStep(lengths_as_decodes(plan), due)
        self._settle_and_keep(self._states, plan, due)
        return None

    def _keep_unsettled(self, plan: StepPlan) -> None:
        """Queue that states are kept which the graph of a step with guesses has settled. It has not
        changed them since."""
        if self._states is not None and len(plan.checks.rows):
            self._settle_and_keep(self._states, plan, [])

    def _settle_and_keep(self, states: StateStorage, plan: StepPlan, due: Due) -> None:
        """Queue what happens to recurrent states before a plan computes anything."""
        if due:
            states.settle(Settling.of(due, self.device.upload))
        if len(plan.snapshots.kept_rows):
            states.keep(plan.snapshots.kept_rows, plan.snapshots.kept)

    def _finish(
        self,
        plan: StepPlan,
        sample: Callable[[], StepOutput],
        score: Callable[[], ScoredChunks | None] | None = None,
        embedded: Embeddings | None = None,
    ) -> HostOutput:
        """Queue sampling, then the scores of prompts, then copies of all results to the host."""
        output, rows, scored = sample(), plan.sample_rows, None
        self._has_sampled = True
        if score is not None:
            with self.stages.mark("prompt logprobs"):
                found = score()
            scored = None if found is None else found.download(self.device)
        return HostOutput(
            self.device.download(output.tokens[: len(rows)]),
            self.stages.sampler.logprobs(output, rows),
            scored,
            None if embedded is None else embedded.download(self.device),
        )

    def _graphs_for(self, rows: IntArray | HostArray) -> StepGraphs:
        """The graphs for a step with these rows."""
        are_adapted = self._adapters is not None and self._adapters.have_any(rows)
        return self.adapter_graphs if are_adapted else self.graphs

    def _layers(self, batch: FlatBatch) -> LayersOutput:
        """What the layers return of the step; rows of padding may follow its tokens."""
        if self._states is not None:
            self._states.restore(batch)
        graphs = self._graphs_for(batch.rows).chunk
        size = None if graphs is None else graphs.size_for(batch)
        if graphs is not None and size is not None:
            return graphs.replay(size, batch)
        return self.stages.forward.over_batch(batch)

    def _compile_and_capture(self, progress: Progress) -> None:
        """Compile the kernels of steps of all kinds, check that the largest step fits, and capture
        graphs; once, on a GPU."""
        stages, warm_up = self.stages, WarmUp(self.stages, self._layers)
        if self._states is not None:
            self._states.compile(self.device.upload)
        warm_up.all_kinds()
        if self._adapters is not None:
            self._adapters.with_dummy_adapter(warm_up.all_kinds)
        self.graphs = capture_steps(stages, progress)
        if stages.mtp is not None and stages.limits.graph_sizes:
            most_rows = min(stages.limits.most_checks, stages.limits.graph_sizes[-1])
            stages.mtp.capture(batch_sizes(most_rows, None), progress)
        if self._adapters is not None:
            self.adapter_graphs = capture_steps(stages, progress, adapted=True)
        is_grouped = take_groups_of(stages.attention) is not None
        if self.graphs or is_grouped:
            # once more, since it has to fit beside the graphs, which are captured without groups
            warm_up.largest(grouped=is_grouped)


def _copied_slots(copies: Copies, page_size: int) -> HostArray:
    """The slots that copies read, and those that they write, int64[2, num_positions]."""
    ends, lengths = np.cumsum(copies.lengths), copies.lengths
    offsets = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    pages = np.stack([copies.sources, copies.targets]).astype(np.int64)
    return np.asarray(np.repeat(pages, lengths, axis=1) * page_size + offsets)
