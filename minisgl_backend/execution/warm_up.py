"""Dummy steps at the start, which compile kernels and check that the largest step fits in memory.

Knows the stages of a step. Must not know graphs, although ``layers`` may replay some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from minisgl_backend.execution.fitting import must_fit
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.mtp import MTPGuesses
from minisgl_backend.execution.stages import Stages
from minisgl_backend.limits import Limits
from minisgl_backend.models.decoder import LayersOutput
from minisgl_backend.plan import (
    NO_SNAPSHOT,
    TO_SAMPLE,
    Checks,
    Decodes,
    Groups,
    PromptChunks,
    Snapshots,
    StepPlan,
)

_OF_STEPS: Final = (
    "memory_ratio, num_pages, max_prefill_tokens, max_running_requests, speculative_tokens or "
    "speculative_mtp_tokens"
)
"""The options that a step's memory depends on."""


class WarmUp:
    """Runs dummy steps. Raises ``ConfigError`` if the remaining memory cannot hold one."""

    def __init__(self, stages: Stages, layers: Callable[[FlatBatch], LayersOutput]) -> None:
        """``layers`` enqueues the layers of a step."""
        self._stages = stages
        self._layers = layers
        limits = self._limits = stages.limits
        longest = limits.section or limits.max_sequence_length
        self._longest_chunk = min(limits.max_prefill_tokens, longest)

    def all_kinds(self) -> None:
        """Run steps of all kinds, including the largest."""
        self.largest()
        if self._limits.most_guesses:
            self._step([], 1, checks=[2])
        for length in (min(self._longest_chunk, 64), 1):
            self._step([length], 0)
        self._step([], 1)
        for num_decodes in _powers_of_two(self._limits.max_rows):
            self._step([1], num_decodes)  # attention may have a kernel for each
        if self._stages.mtp is not None:
            for num_rows in (1, self._limits.most_checks):
                self._guess(self._stages.mtp, num_rows)

    def _guess(self, mtp: MTPGuesses, num_rows: int) -> None:
        """Let the MTP layer guess for as many dummy rows."""
        what = f"making guesses of the MTP layer for {num_rows} rows"
        options = "memory_ratio, num_pages or speculative_max_requests"
        with must_fit(self._stages.device, what, options=options):
            mtp.guess(np.full(num_rows, self._stages.rows.table.dummy_row, np.int32))

    def largest(self, *, grouped: bool = False) -> None:
        """Run the largest step, in which all rows without a chunk decode, and as many guesses are
        checked as there may be. If ``grouped``, these rows share all pages that a row can have, so
        that reading pages together is surely faster.
        """
        limits, checks = self._limits, self._checks()
        chunks = self._chunks(checks, self._longest_chunk)
        num_decodes = limits.max_rows - len(checks) - len(chunks)
        self._step(chunks, num_decodes, checks=checks, grouped=grouped)
        attention = self._stages.attention
        if (expansion := attention.expansion) is not None:
            end = attention.longest_expanded or limits.max_sequence_length
            chunks = self._chunks([], min(self._longest_chunk, end))
            chunks[0] = min(chunks[0], end // 2)
            prefix = min(end - chunks[0], expansion.most_positions)
            self._step(chunks, min(num_decodes, limits.max_rows - len(chunks)), prefix=prefix)

    def _chunks(self, checks: Sequence[int], longest: int) -> list[int]:
        """The lengths of as many chunks, each of up to ``longest`` tokens, as fit a step with
        ``checks``."""
        limits = self._limits
        num_whole, rest = divmod(limits.max_prefill_tokens - sum(checks), longest)
        chunks = [longest] * num_whole + [rest] * (rest > 0)
        return chunks[: limits.max_rows - len(checks)]

    def _checks(self) -> list[int]:
        """The lengths of checks with as many guesses as there may be in a step."""
        left, lengths = self._limits.most_guesses, list[int]()
        while left and self._longest_chunk > 1:
            lengths.append(min(1 + left, self._longest_chunk))
            left -= lengths[-1] - 1
        return lengths[: self._limits.max_rows]

    def _step(
        self,
        chunks: list[int],
        num_decodes: int,
        *,
        checks: Sequence[int] = (),
        prefix: int = 0,
        grouped: bool = False,
    ) -> None:
        """Run a step with ``checks`` and ``chunks`` of these lengths, the first chunk behind
        ``prefix`` positions, and ``num_decodes`` decoding rows. It computes the log-probabilities
        of all its samples and chunks."""
        stages = self._stages
        last = self._limits.max_sequence_length - 1 if grouped else 0
        plan = self._dummy_plan(checks, chunks, prefix, num_decodes, last)
        with must_fit(stages.device, f"a step of {plan.num_tokens} tokens", options=_OF_STEPS):
            batch = FlatBatch.of(plan)
            if num_decodes and (num_shared := last // stages.rows.page_size):
                batch = replace(batch, groups=_one_group(num_decodes, num_shared))
            tokens = plan.chunks.tokens
            layers_output = self._layers(batch)
            hidden, due = layers_output.residual, stages.logits_of(batch, layers_output)
            if stages.model.group.size > 1:
                stages.sample(due, all_logits=False)
            output = stages.sample(due, all_logits=True)
            for num_top in (0, Limits().logprobs) if len(tokens) else ():
                stages.scorer.score(hidden, np.arange(len(tokens)), tokens, num_top)
            stages.embedder.embed(hidden[: len(output.tokens)])
            wanted = np.ones(len(output.tokens), np.int64)
            RawLogprobs.of(output.logits, output.tokens, wanted, stages.device.upload)

    def _dummy_plan(
        self,
        checks: Sequence[int],
        chunks: Sequence[int],
        prefix: int,
        num_decodes: int,
        position: int,
    ) -> StepPlan:
        """A plan that uses the dummy row throughout, so that only the dummy page is written. The
        first chunk begins behind ``prefix``; decoding rows are at ``position``."""
        row = self._stages.rows.table.dummy_row
        starts = np.zeros(len(chunks), np.int32)
        starts[:1] = prefix
        return StepPlan(
            step=-1,
            snapshots=Snapshots(begun_from=np.full(len(chunks), NO_SNAPSHOT, np.int32)),
            checks=Checks(
                rows=np.full(len(checks), row, np.int32),
                starts=np.zeros(len(checks), np.int32),
                lengths=np.array(checks, np.int32),
                tokens=np.zeros(sum(checks), np.int32),
            ),
            chunks=PromptChunks(
                rows=np.full(len(chunks), row, np.int32),
                starts=starts,
                lengths=np.array(chunks, np.int32),
                next_tokens=np.full(len(chunks), TO_SAMPLE, np.int32),
                tokens=np.zeros(sum(chunks), np.int32),
            ),
            decodes=Decodes(
                rows=np.full(num_decodes, row, np.int32),
                positions=np.full(num_decodes, position, np.int32),
            ),
        )


def _powers_of_two(end: int) -> list[int]:
    """1, 2, 4, ... below ``end``."""
    return [1 << exponent for exponent in range((end - 1).bit_length())]


def _one_group(num_members: int, num_pages: int) -> Groups:
    """All decoding rows, which share their first pages."""
    return Groups(
        sizes=np.array([num_members], np.int32),
        begins=np.zeros(1, np.int32),
        ends=np.array([num_pages], np.int32),
        members=np.arange(num_members, dtype=np.int32),
    )
