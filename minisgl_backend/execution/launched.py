"""Steps in the queue of a device, until their tokens are read: what ``launch`` returns.

A ``LaunchedStep`` is queued as a whole. A ``MaskedStep`` is queued up to its logits, and the rest
once the masks of its rows are written. Must not know pages, or how a step computes its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from minisgl_backend.device.base import Submission
from minisgl_backend.errors import InvariantError
from minisgl_backend.execution.embeddings import Embeddings
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.prompt_logprobs import ScoredChunks
from minisgl_backend.execution.sampling import Sampler
from minisgl_backend.plan import SampledTokens
from minisgl_backend.request import EMPTY, IntArray

T = TypeVar("T")

Checked: TypeAlias = Callable[[], IntArray]
"""Returns the tokens of a step's checks, int32 [num_tokens], once the device has run the step."""


@dataclass(frozen=True, slots=True, eq=False)
class HostOutput:
    """All results of a step, on the host; ``tokens`` int32 [num_samples]."""

    tokens: Tensor
    logprobs: RawLogprobs | None
    scored: ScoredChunks | None
    embedded: Embeddings | None

    def sampled(self, checked: Checked | None) -> SampledTokens:
        """The results; valid once the device has run the step and the copies. ``checked`` returns
        the tokens of checks, if the plan does not have all of them."""
        token_ids = self.tokens.numpy()
        logprobs = self.logprobs.by_sample(token_ids) if self.logprobs else {}
        scored = self.scored.by_chunk() if self.scored else ()
        embeddings = self.embedded.by_sample() if self.embedded else {}
        tokens = None if checked is None else checked()
        return SampledTokens(token_ids, logprobs, scored, embeddings, checked=tokens)


class Submit(Protocol):
    """``ModelExecutor._submit``."""

    def __call__(self, part: Callable[[], T], /) -> Submission[T]: ...


class LaunchedStep:
    """A step in the queue (``Pending``)."""

    def __init__(self, submission: Submission[HostOutput], checked: Checked | None):
        """``checked``: see ``HostOutput.sampled``."""
        self._submission = submission
        self._checked = checked

    def masks(self, num_masks: int) -> IntArray:
        raise InvariantError("a step without masked rows is given masks")

    def mask(self, samples: IntArray) -> None:
        raise InvariantError("a step without masked rows is given masks")

    def tokens(self) -> SampledTokens:
        return self._submission.result().sampled(self._checked)


class MaskedStep:
    """A step whose first part is in the queue, and whose sampling waits for masks (``Pending``)."""

    def __init__(
        self,
        begin: Callable[[], Callable[[], HostOutput]],
        sampler: Sampler,
        submit: Submit,
        *,
        checked: Checked | None,
        guess: Callable[[], Submission[Tensor]] | None,
        reported: IntArray,
    ):
        """``begin`` queues the first part, and returns a function that queues the rest. Then
        ``guess`` queues the MTP layer's guesses, int32 [num_guesses, num_rows]; the planner gets
        the columns ``reported``. ``checked``: see ``HostOutput.sampled``."""
        self._sampler = sampler
        self._submit = submit
        self._checked = checked
        self._guess, self._reported = guess, reported
        self._guesses: Submission[Tensor] | None = None
        self._finish: Callable[[], HostOutput] | None = None

        def first() -> None:
            self._finish = begin()

        self._begun = submit(first)
        self._sampled: Submission[HostOutput] | None = None

    @property
    def waits(self) -> bool:
        """Whether the step still waits for masks."""
        return self._sampled is None

    def masks(self, num_masks: int) -> IntArray:
        return self._sampler.staged_masks(num_masks)

    def mask(self, samples: IntArray) -> None:
        def rest() -> HostOutput:
            if self._finish is None:
                raise InvariantError("the step broke before it could sample")
            self._sampler.mask(samples)
            return self._finish()

        self._sampled = self._submit(rest)
        if self._guess is not None:
            self._guesses = self._guess()

    def tokens(self) -> SampledTokens:
        if self._sampled is None:
            self.mask(EMPTY)
        assert self._sampled is not None
        self._begun.result()  # raises what broke it
        sampled = self._sampled.result().sampled(self._checked)
        if self._guesses is None or not len(self._reported):
            return sampled
        return replace(sampled, mtp_guesses=self._guesses.result().numpy()[:, self._reported].T)
