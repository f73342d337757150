"""Follows the answers of requests through their grammars, and writes masks of the tokens that may
come next.

``compiler`` compiles grammars. Everything here is called by the engine's loop, for all rows of a
step at once, and runs without the GIL on several threads: the loop waits while tokens are taken,
and goes on while masks are written. Must not know rows, devices or what a token means: a mask is a
line of an array that the caller provides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from enum import Enum, auto
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher

from minisgl_backend.errors import InvalidRequest, MiniSGLError
from minisgl_backend.grammar.compiler import Compiler
from minisgl_backend.grammar.complaints import one_line
from minisgl_backend.grammar.sources import check_source
from minisgl_backend.request import IntArray, SamplingParams, TokenId

WORD: Final = 32
"""Tokens per word of a mask: token t may come next if bit t % 32 of word t // 32 is set."""

_NOT_ALLOWED: Final = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that the mask forbids; other errors are about limits."""


class AnswerState(Enum):
    """The state of an answer that cannot go on after its last token."""

    COMPLETE = auto()
    """Nothing may follow."""
    TOO_COMPLEX = auto()
    """Following the token took too much work."""
    BROKEN = auto()
    """The token was not allowed."""


class Matcher:
    """The state of one request's answer within its grammar.

    Some tokens are held back as long as others may follow: stop tokens until there are
    ``min_tokens``, and with ``ignore_eos`` end tokens all the time. They are allowed if the grammar
    allows nothing else.
    """

    __slots__ = ("_held_back", "_num_tokens", "grammar", "inner", "is_free", "may_open")

    def __init__(
        self, inner: LLMatcher, sampling: SamplingParams, eos_token_ids: Sequence[TokenId]
    ) -> None:
        """``inner`` is at the beginning of the grammar."""
        assert sampling.grammar is not None
        self.inner = inner
        self.grammar = sampling.grammar
        self.is_free = False
        """Whether the grammar has not begun. Then any token may follow, except end tokens."""
        self.may_open: TokenId | None = None
        """The token that may begin a free section here, instead of the grammar."""
        self._begin()
        self._held_back: list[tuple[int, TokenId]] = []
        """Tokens that are held back, each until the answer has that length."""
        if sampling.min_tokens:
            early = {*sampling.stop_token_ids, *eos_token_ids}
            self._held_back += [(sampling.min_tokens, token_id) for token_id in sorted(early)]
        if sampling.ignore_eos:
            self._held_back += [(sampling.max_tokens, token_id) for token_id in eos_token_ids]

    def _begin(self) -> None:
        self._num_tokens = 0
        has_section = self.grammar.begins_after is not None
        self.may_open = self.grammar.opened_by if has_section else None
        self.is_free = has_section and self.may_open is None

    def start_anew(self, token_ids: Sequence[TokenId]) -> None:
        """Go back to the beginning, and take these tokens."""
        self._begin()
        self.inner.reset()
        self.consume(token_ids)

    def consume(self, token_ids: Sequence[TokenId]) -> None:
        """Take these tokens; something may follow each of them."""
        self.inner.consume_tokens([token for token in token_ids if self.take(token)])

    def forced(self) -> Sequence[TokenId]:
        """The tokens that must come next, as far as there is no choice."""
        return () if self.is_free or self.may_open is not None else self.inner.compute_ff_tokens()

    def allowed(self, guesses: Sequence[TokenId]) -> int:
        """How many of ``guesses``, from the first on, may come next, so that something may follow
        each of them; none where a free section may begin."""
        if self.may_open is not None:
            return 0
        ahead, inner = copy(self), self.inner.deep_copy()
        for index, guess in enumerate(guesses):
            if ahead.take(guess) and (not inner.try_consume_tokens([guess]) or inner.is_stopped()):
                return index
        return len(guesses)

    def along(self, guesses: Sequence[TokenId]) -> Iterator[Matcher]:
        """What this matcher will be before and after each of ``guesses``, if they are right; all
        with the ``inner`` of now."""
        ahead = copy(self)
        yield copy(ahead)
        for guess in guesses:
            ahead.take(guess)
            yield copy(ahead)

    def take(self, token_id: TokenId) -> bool:
        """Count a token of the answer. Returns whether it is part of the grammar, not of the free
        section before it."""
        self._num_tokens += 1
        if self.may_open is not None:
            self.is_free, self.may_open = token_id == self.may_open, None
            return not self.is_free
        if not self.is_free:
            return True
        self.is_free = token_id != self.grammar.begins_after
        return False

    @property
    def has_own_rules(self) -> bool:
        """Whether there are rules besides the grammar: tokens may be held back, or precede it."""
        return bool(self._held_back) or self.grammar.begins_after is not None

    def adjust(self, mask: IntArray) -> None:
        """Apply these rules to ``mask``, int32[num_words], which the grammar has written: set the
        bit of the token that may begin a free section, and clear the bits of tokens that are held
        back, unless none would be left."""
        if (token_id := self.may_open) is not None:
            mask.view(np.uint32)[token_id // WORD] |= np.uint32(1 << token_id % WORD)
        held = [
            token
            for until, token in self._held_back
            if self._num_tokens < until and mask[token // WORD] >> token % WORD & 1
        ]
        if held:
            words = mask.view(np.uint32)
            before = words.copy()
            for token_id in held:
                words[token_id // WORD] &= ~np.uint32(1 << token_id % WORD)
            if not words.any():
                words[:] = before


class _Lines(NamedTuple):
    """What to write the lines of masks from. ``free`` lines are before a grammar. ``now`` has
    matchers with their lines; ``ahead`` has, by index, copies of matchers with the line of their
    mask and guesses, after each of which another mask follows."""

    free: list[int]
    now: list[tuple[LLMatcher, int]]
    ahead: dict[int, tuple[LLMatcher, int, list[TokenId]]]


_NO_GUESSES: Final[Mapping[int, Sequence[TokenId]]] = MappingProxyType({})


class Batch:
    """The matchers of a step's rows, in order.

    Usually they are the same from step to step, so the lists that a step needs are made once. With
    hundreds of rows that would take time, while the device waits.
    """

    def __init__(
        self,
        matchers: Sequence[Matcher],
        guesses: Mapping[int, Sequence[TokenId]] = _NO_GUESSES,
    ) -> None:
        """``guesses`` at the next tokens of some answers, by index, which ``Matcher.allowed``
        allows: there is a mask before and after each of them."""
        self.guesses = guesses
        counts = [1 + len(guesses.get(index, ())) for index in range(len(matchers))]
        self.first_lines: IntArray = np.cumsum([0, *counts], dtype=np.int32)[:-1]
        """The line of each matcher's first mask."""
        self.matchers = matchers
        self.inners = [matcher.inner for matcher in matchers]
        self.with_rules = [
            (index, matcher) for index, matcher in enumerate(matchers) if matcher.has_own_rules
        ]
        self._lines = list(zip(self.inners, self.first_lines.tolist(), strict=True))

    def take(self, token_ids: Sequence[TokenId]) -> Sequence[int]:
        """Count a token of each answer; returns the indices of the answers whose grammar must take
        it."""
        before = {index for index, matcher in self.with_rules if not matcher.take(token_ids[index])}
        indices = range(len(self.inners))
        return [index for index in indices if index not in before] if before else indices

    def lines(self) -> _Lines:
        """The lines of the masks of the next step."""
        free = {index for index, matcher in self.with_rules if matcher.is_free}
        free -= self.guesses.keys()
        now, others = self._lines, free | self.guesses.keys()
        if others:
            now = [line for index, line in enumerate(now) if index not in others]
        lines = _Lines([int(self.first_lines[index]) for index in free], now, {})
        for index in self.guesses:
            self._look_ahead(index, lines)
        return lines

    def _look_ahead(self, index: int, lines: _Lines) -> None:
        """Add the ``lines`` of a matcher with guesses."""
        matcher, guesses = self.matchers[index], list(self.guesses[index])
        first = int(self.first_lines[index])
        num_free = sum(state.is_free for state in matcher.along(guesses))
        lines.free.extend(range(first, first + num_free))
        if num_free < len(guesses):
            copied = matcher.inner.deep_copy()
            lines.ahead[index] = copied, first + num_free, guesses[num_free:]
        elif num_free == len(guesses):
            lines.now.append((matcher.inner, first + num_free))


class Filling:
    """Masks that are being written (``Grammars.fill``)."""

    def __init__(
        self,
        batch: Batch,
        masks: IntArray,
        ahead: Mapping[int, LLMatcher],
        work: Future[None] | None,
        compiler: Compiler,
    ) -> None:
        """``ahead`` are the copies of matchers that stand in for them, by index."""
        self._batch = batch
        self._masks = masks
        self._inners = batch.inners if not ahead else batch.inners.copy()
        for index, inner in ahead.items():
            self._inners[index] = inner
        self._work = work
        self._compiler = compiler

    def wait(self) -> None:
        """Wait until all are written, or cannot be: then the matchers may be used."""
        if self._work is not None:
            futures.wait([self._work])

    def result(self) -> dict[int, str]:
        """Wait until all are written. If any matchers have reached their limits, returns why, by
        index."""
        if self._work is not None:
            self._work.result()
        batch = self._batch
        for index, matcher in batch.with_rules:
            if not self._inners[index].is_error():
                states = matcher.along(batch.guesses.get(index, ()))
                for line, state in enumerate(states, int(batch.first_lines[index])):
                    state.adjust(self._masks[line])
        failed = {}
        for index, inner in enumerate(self._inners):
            if inner.is_error():
                failed[index] = f"the grammar is too complex: {one_line(inner.get_error())}"
                self._compiler.drop(batch.matchers[index].grammar)
        return failed


class Grammars:
    """The grammars of an engine with one tokenizer. A mask has ``num_words`` words."""

    def __init__(
        self,
        load: Callable[[], tuple[str, Mapping[str, TokenId]]],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[TokenId],
    ) -> None:
        """``load`` is called when the tokenizer is needed: see ``Compiler``."""
        self.num_words = -(-vocab_size // WORD)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiler = Compiler(load, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._filler = ThreadPoolExecutor(1, "masks")
        # [num_words]; bits beyond the vocabulary are set, but never read
        self._free: IntArray = np.full(self.num_words, -1, np.int32)
        for token_id in eos_token_ids:
            self._free.view(np.uint32)[token_id // WORD] &= ~np.uint32(1 << token_id % WORD)

    @cached_property
    def _fillers(self) -> LLExecutor:
        return LLExecutor()  # starts threads

    def prepare(self) -> None:
        """Read the tokenizer now, on another thread."""
        self._compiler.prepare()

    def wait_until_prepared(self) -> None:
        """Wait for what ``prepare`` has begun, if it has been called."""
        self._compiler.wait_until_prepared()

    def compile(
        self, sampling: SamplingParams, done: Callable[[Matcher | MiniSGLError], None]
    ) -> Callable[[], bool] | None:
        """Call ``done`` with a matcher for a request with these parameters, or with the error of
        its grammar: on another thread, or immediately.

        Returns a function that cancels the compilation if it has not begun. It returns whether it
        did so: then ``done`` is not called.
        """
        grammar = sampling.grammar
        assert grammar is not None
        try:
            check_source(grammar)
            self._check_tokens(grammar.begins_after, grammar.opened_by)
        except InvalidRequest as error:
            done(error)
            return None

        def finish(made: Future[LLMatcher]) -> None:
            if made.cancelled():
                return
            error = made.exception()
            if error is None:
                done(Matcher(made.result(), sampling, self._eos_token_ids))
            else:
                assert isinstance(error, MiniSGLError)
                done(error)

        asked = self._compiler.ask(grammar)
        asked.add_done_callback(finish)
        return asked.cancel

    def advance(self, batch: Batch, token_ids: Sequence[TokenId]) -> dict[int, AnswerState]:
        """Take one more token of each answer; returns the answers that cannot go on, by index."""
        inners, indices = batch.inners, batch.take(token_ids)
        if not indices:
            return {}
        self._fillers.consume_token_par([(inners[index], token_ids[index]) for index in indices])
        states = {
            index: _state_of(inners[index]) for index in indices if inners[index].is_stopped()
        }
        for index, state in states.items():
            if state is AnswerState.TOO_COMPLEX:
                self._compiler.drop(batch.matchers[index].grammar)
        return states

    def fill(self, batch: Batch, masks: IntArray) -> Filling:
        """Begin to write ``masks``, int32[num_masks, num_words]: a bit for each token, 1 if it may
        come next. The matchers must not be used until this is done."""
        free, now, of_guesses = batch.lines()
        for line in free:
            masks[line] = self._free
        ahead = {index: copied for index, (copied, _, _) in of_guesses.items()}
        if not (now or ahead):
            return Filling(batch, masks, ahead, None, self._compiler)
        assert masks.flags.c_contiguous
        memory = masks.ctypes.data, self.num_words * masks.itemsize, len(masks)
        fillers, with_guesses = self._fillers, list(of_guesses.values())
        has_lock = threading.Event()

        def work() -> None:
            has_lock.set()
            if now:
                fillers.unsafe_compute_mask_ptr(now, *memory)
            if with_guesses:
                fillers.unsafe_compute_mask_ptr_with_draft_token(with_guesses, *memory)

        filling = Filling(batch, masks, ahead, self._filler.submit(work), self._compiler)
        has_lock.wait()  # else this thread would keep the GIL for milliseconds
        return filling

    def close(self) -> None:
        """End threads and processes. Idempotent."""
        self._filler.shutdown()
        self._compiler.close()

    def _check_tokens(self, *token_ids: TokenId | None) -> None:
        for token_id in token_ids:
            if token_id is not None and not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(f"a grammar cannot begin after {token_id}: it is not a token")


def _state_of(stopped: LLMatcher) -> AnswerState:
    if not stopped.is_error():
        return AnswerState.COMPLETE
    return AnswerState.BROKEN if _NOT_ALLOWED in stopped.get_error() else AnswerState.TOO_COMPLEX
