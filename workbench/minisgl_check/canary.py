"""Six greedy prompts whose answers must stay the same, token by token, under any load.

Knows the prompts and their answers from an idle server. A cached page that is stale, shared by
mistake, or another request's would change an answer.

Rounding may depend on the batch, so the best token must lead the second by far, as the demo model's
do for these prompts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_backend.errors import EngineFailure
from minisgl_check.case import Case
from minisgl_check.target import Target

_HISTORY: Final = (
    {"role": "user", "content": "What is the opposite of hot?"},
    {"role": "assistant", "content": "cold"},
)
PROMPTS: Final[tuple[dict[str, Any], ...]] = (
    {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    {"messages": [{"role": "user", "content": "Count from 1 to 10."}]},
    {"messages": [*_HISTORY, {"role": "user", "content": "How do you spell banana?"}]},
    {"prompt": "What is the capital of Italy?"},
    {"messages": [{"role": "user", "content": "Write a poem about the sea."}]},
    {"messages": [{"role": "user", "content": "What day comes after Monday?"}]},
)
_PAUSE_S: Final = 0.05
_PATIENCE_S: Final = 60.0
REFUSALS: Final = frozenset({"UNAVAILABLE", "TIMEOUT"})
"""Errors that a canary may get from an overloaded server."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None


class Canary:
    """Sends the prompts in turn; belongs to one thread at a time."""

    def __init__(self, target: Target) -> None:
        self._client = Client(target.grpc_address, retries=0, timeout_s=_PATIENCE_S)
        self._expected: list[Answer] = []
        self._next = 0
        self.num_runs = 0
        self.mismatches: list[str] = []
        self.errors: Counter[str] = Counter()

    def record(self) -> None:
        """Ask all prompts twice, with nothing else going on.

        Raises ``EngineFailure`` if the second answers differ, ``MinisglError`` if one fails.
        """
        self._expected = [self._ask(prompt) for prompt in PROMPTS]
        for prompt, answer in zip(PROMPTS, self._expected, strict=True):
            if self._ask(prompt) != answer:
                raise EngineFailure(f"two greedy answers to {prompt} differ on an idle server")

    def compare(self) -> None:
        """Ask the next prompt, and note the result."""
        index = self._next
        self._next = (index + 1) % len(PROMPTS)
        try:
            answer = self._ask(PROMPTS[index])
        except MinisglError as error:
            self.errors[error.code] += 1
            return
        self.num_runs += 1
        expected = self._expected[index]
        if answer != expected:
            self.mismatches.append(f"prompt {index}: {answer.text!r} is not {expected.text!r}")

    def compare_all(self) -> None:
        """Ask each prompt once."""
        for _ in PROMPTS:
            self.compare()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Compare again and again, on a thread of its own."""
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                self.compare()
                time.sleep(_PAUSE_S)

        thread = threading.Thread(target=watch, name="canary")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def case(self) -> Case:
        """The results so far; errors other than refusals are failures."""
        case = Case("canary", self.num_runs, failures=list(self.mismatches))
        refused = sum(count for code, count in self.errors.items() if code in REFUSALS)
        case.what = f"{len(self.mismatches)} mismatches, {refused} refused under load"
        for code, count in self.errors.items():
            case.expect(code in REFUSALS, f"{count} ended with {code}")
        case.expect(self.num_runs, "never answered")
        case.figures = {
            "canary runs": self.num_runs,
            "canary mismatches": len(self.mismatches),
        }
        return case

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _ask(self, prompt: dict[str, Any]) -> Answer:
        result = self._client.generate(
            **prompt, max_tokens=24, temperature=0.0, return_logprobs=True
        )
        ids = tuple(one.chosen.token_id for one in result.logprobs)
        return Answer(ids, result.text, result.finish_reason)
