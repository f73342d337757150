"""Gives what a step has sampled to the sequences, and ends those that are complete.

Works by value, in the order of the plans. Knows rows, the lifecycle, how many guesses were right,
and for which rows the MTP layer has guessed. Must not know the queue, or what is planned next.
"""

from __future__ import annotations

from typing import Final, cast

import numpy as np

from minisgl_backend.errors import EngineFailure, InvariantError
from minisgl_backend.plan import NO_TOKEN, SampledTokens, StepPlan
from minisgl_backend.request import (
    Failed,
    Finished,
    FinishReason,
    IntArray,
    PromptLogprobs,
    RequestId,
    TerminalEvent,
)
from minisgl_backend.scheduling.checks import RowCheck, row_checks
from minisgl_backend.scheduling.guesses import Guesser
from minisgl_backend.scheduling.lifecycle import Lifecycle
from minisgl_backend.scheduling.report import Counters, StepResult

_NOT_FINITE: Final = "the model's logits were not finite"


class Intake:
    """Takes the tokens of committed steps for the sequences of ``life``."""

    def __init__(self, life: Lifecycle, guesser: Guesser | None, counters: Counters) -> None:
        self._life = life
        self._rows = life.rows
        self._guesser = guesser
        self._counters = counters

    def take(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        """Take the tokens of ``plan``, and release what nothing uses anymore."""
        rows, checks, chunks, decodes = self._rows, plan.checks, plan.chunks, plan.decodes
        sample_rows = plan.sample_rows
        if len(tokens.token_ids) != len(sample_rows):
            raise InvariantError(f"{len(tokens.token_ids)} tokens for {len(sample_rows)} samples")
        step_rows = np.concatenate([checks.rows, chunks.rows, decodes.rows])
        rows.landed(
            step_rows, np.concatenate([checks.starts + 1, chunks.ends, decodes.positions + 1])
        )
        scored = self._take_scores(plan, tokens.prompt_logprobs)
        if len(checks.rows):
            result = self._take_guessed(plan, tokens, scored)
        else:
            result = self._take(sample_rows, tokens, scored)
        for row in chunks.rows.tolist():
            sequence = rows.sequences[row]
            if sequence is not None and not sequence.failed:
                self._life.publish(sequence, sequence.tokens)
        for row in step_rows[rows.is_idle(step_rows)].tolist():
            self._life.release(rows.sequence(row))
        self._take_mtp(plan, tokens.mtp_guesses)
        return result

    def _take_mtp(self, plan: StepPlan, guesses: IntArray) -> None:
        """Let rows use what the MTP layer has guessed; ``guesses`` are those that are reported."""
        reported_rows = plan.reported_rows
        if len(guesses) != len(reported_rows):
            raise InvariantError(
                f"MTP guesses for {len(guesses)} rows, not for {len(reported_rows)}"
            )
        if self._guesser is not None and len(plan.mtp_rows):
            self._guesser.take_mtp(plan.mtp_rows, reported_rows, guesses)

    def _take_scores(
        self, plan: StepPlan, scores: tuple[PromptLogprobs, ...]
    ) -> list[tuple[RequestId, PromptLogprobs]]:
        """Give the log-probabilities of prompts to their sequences."""
        if len(scores) != len(plan.scores.chunks):
            raise InvariantError(f"{len(scores)} scores for {len(plan.scores.chunks)} chunks")
        found = []
        for chunk, score in zip(plan.scores.chunks.tolist(), scores, strict=True):
            row = int(plan.chunks.rows[chunk])
            if self._rows.accepting[row]:
                sequence = self._rows.sequence(row)
                sequence.num_scored += len(score)
                found.append((sequence.request.id, score))
        return found

    def _take_guessed(
        self,
        plan: StepPlan,
        tokens: SampledTokens,
        scored: list[tuple[RequestId, PromptLogprobs]],
    ) -> StepResult:
        """``_take`` for a step with guesses. A row gets its right guesses before the token that the
        step has sampled for it."""
        rows, sample_rows, checks = self._rows, plan.sample_rows, row_checks(plan, tokens)
        is_due = np.ones(len(sample_rows), np.bool_)
        right: list[int] = []  # indices of samples that equal guesses
        judged: list[tuple[RowCheck, int]] = []  # of rows that take tokens
        for check in checks:
            samples = check.samples(tokens.token_ids)
            # after a wrong guess, too: the row's pages hold NaN until it gets there
            broken = np.flatnonzero(samples == NO_TOKEN)
            due, num_right = int(broken[0]) if len(broken) else 0, 0
            if rows.accepting[check.row]:
                if not len(broken):
                    due = num_right = rows.take_right(check.row, check.guesses, samples)
                    right += range(check.first, check.first + due)
                judged.append((check, num_right))
            is_due[check.first : check.first + len(samples)] = False
            is_due[check.first + due] = True
        early, late = np.array(right, dtype=np.int32), np.flatnonzero(is_due)
        request_ids = cast("list[RequestId]", rows.request_ids[sample_rows[early]].tolist())
        first, rest = tokens.at(early), self._take(sample_rows[late], tokens.at(late), scored)
        for check, num_right in judged:
            self._judge(check, num_right)
        return StepResult(
            request_ids + rest.request_ids,
            np.concatenate([first.token_ids, rest.token_ids]),
            {**first.logprobs, **{len(right) + index: it for index, it in rest.logprobs.items()}},
            rest.scored,
            rest.ended,
            rest.embedded,
        )

    def _judge(self, check: RowCheck, num_right: int) -> None:
        """Count a row's guesses, and let it go on after those that were right, unless it has
        ended."""
        row, counters, num_guesses = check.row, self._counters, len(check.guesses)
        counters.num_checks += 1
        counters.num_guesses += num_guesses
        counters.num_right_guesses += num_right
        counters.num_checks_by_right[num_right] += 1
        if self._guesser is not None and self._rows.accepting[row]:
            self._rows.go_on_from_guesses(row, num_guesses - num_right)
            self._guesser.go_back(row, num_guesses - num_right)
            self._guesser.judge(row, num_guesses, num_right)

    def _take(
        self,
        sample_rows: IntArray,
        tokens: SampledTokens,
        scored: list[tuple[RequestId, PromptLogprobs]],
    ) -> StepResult:
        """Give the sampled tokens to their sequences, and end the sequences that are complete.

        A row that no longer accepts tokens belongs to a request that was aborted or has ended. A
        request with ``max_tokens`` 0 ends with its first token, which is dropped.
        """
        rows, token_ids = self._rows, tokens.token_ids
        ended: dict[RequestId, TerminalEvent] = {}
        accepted = rows.accepting[sample_rows]  # [num_samples], as are token_ids
        failed = token_ids == NO_TOKEN
        if failed.any():
            for row in sample_rows[failed].tolist():  # also of requests that have since ended
                rows.sequence(row).failed = True
            for request_id in self._end_rows(sample_rows[accepted & failed]):
                ended[request_id] = Failed(EngineFailure(_NOT_FINITE))
            accepted &= ~failed
        embedded = [
            (rows.sequence(int(sample_rows[index])).request.id, vector)
            for index, vector in tokens.embeddings.items()
            if accepted[index]
        ]
        surplus = accepted & rows.are_complete(sample_rows)
        if surplus.any():
            for request_id in self._end_rows(sample_rows[surplus]):
                ended[request_id] = Finished(FinishReason.LENGTH)
            accepted &= ~surplus
        if not accepted.all():
            kept = np.flatnonzero(accepted)
            sample_rows, tokens = sample_rows[kept], tokens.at(kept)
        request_ids = cast("list[RequestId]", rows.request_ids[sample_rows].tolist())
        ended.update(self._append(sample_rows, tokens.token_ids))
        logprobs = dict(tokens.logprobs)
        return StepResult(request_ids, tokens.token_ids, logprobs, scored, ended, embedded)

    def _append(self, rows: IntArray, token_ids: IntArray) -> dict[RequestId, Finished]:
        """Append a token to each of ``rows``, int32[n], and end the sequences that it completes."""
        self._rows.append(rows, token_ids)
        stopped, full = self._rows.ends(rows, token_ids)
        ended = {}
        for index in np.flatnonzero(stopped | full).tolist():
            sequence = self._rows.sequence(int(rows[index]))
            stop = int(token_ids[index]) if stopped[index] else None
            reason = FinishReason.LENGTH if stop is None else FinishReason.STOP
            ended[sequence.request.id] = Finished(reason, stop)
            self._life.end(sequence)
        return ended

    def _end_rows(self, rows: IntArray) -> list[RequestId]:
        """End the sequences in ``rows``, int32[n], and return their requests."""
        sequences = [self._rows.sequence(row) for row in rows.tolist()]
        for sequence in sequences:
            self._life.end(sequence)
        return [sequence.request.id for sequence in sequences]
