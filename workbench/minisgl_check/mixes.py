"""Loads of special requests: chats with shared prefixes, more than the pages hold, wrong requests.

Knows what callers get: each request must end once, as it would alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_check.asking import NUM_TOKENS, PROMPT_TOKENS, Asker
from minisgl_check.case import Case, skipped
from minisgl_kit.calls import Call
from minisgl_kit.loads import Load


class Mixes(Asker):
    """The mixed loads for one server."""

    def churn(self) -> Case:
        """Many chats that share a few beginnings, over a cache that cannot hold them all."""
        case = Case("prefix churn")
        facts = ("hot", "big", "fast", "old", "high", "full", "light", "rich")
        asked = ("France", "Italy", "Spain", "Japan", "Norway", "Kenya")
        histories = [facts[i:] + facts[:i] for i in range(len(facts))]
        answers: dict[str, set[str]] = {}

        async def ask(client: AsyncClient, history: Sequence[str], country: str) -> None:
            messages = [
                {"role": role, "content": content}
                for word in history
                for role, content in (
                    ("user", f"What is the opposite of {word}?"),
                    ("assistant", "I do not know."),
                )
            ]
            messages.append({"role": "user", "content": f"What is the capital of {country}?"})
            result = await client.generate(messages=messages, max_tokens=8, temperature=0.0)
            answers.setdefault(f"{history[0]}, {country}", set()).add(result.text)

        before = self._target.stats().engine["scheduler"]
        drawn = [
            (self._rng.choice(histories), self._rng.choice(asked))
            for _ in range(self._extent.num_churned)
        ]
        clients = self._num_clients
        errors = self._ask_all(drawn, ask, clients)
        after = self._target.stats().engine["scheduler"]
        case.count = len(drawn)
        case.ended["answered"] = len(drawn) - sum(errors.values())
        for code, count in errors.items():
            case.expect(False, f"{count} ended with {code}")
            case.ended["failed"] += count
        for name, texts in answers.items():
            case.expect(len(texts) == 1, f"the answers to {name!r} differ: {sorted(texts)}")
        queries = after["prefix_queries"] - before["prefix_queries"]
        hits = after["prefix_hits"] - before["prefix_hits"]
        case.expect(hits, "no prefix was found again")
        case.what = f"{100 * hits / max(1, queries):.0f} % of the prompt tokens were cached"
        return case

    def small_pool(self) -> Case:
        """Eight clients, when two and a half of their requests fill the pages."""
        name = "pages for 2.5 requests"
        length = int(self._num_positions / 2.5)
        if length > int(self._info["max_sequence_length"]):
            return skipped(name, "the server has pages for longer requests than there are")
        clients = min(8, int(self._info["max_running_requests"]) + 4)
        case = Case(name)
        before = self._target.stats().engine["scheduler"]["num_retractions"]
        num_tokens = length - PROMPT_TOKENS
        calls = [
            Call(num_tokens, self._prompt())
            for _ in range(clients * max(1, round(self._extent.load_s / 15)))
        ]
        outcomes = self._run(Load("pool", clients, calls, concurrency=clients))
        self._judge(case, outcomes, may_refuse=False, num_tokens=num_tokens)
        retractions = self._target.stats().engine["scheduler"]["num_retractions"] - before
        longest_s = max(one.e2e_ms for one in outcomes) / 1e3
        case.what = f"{retractions} retractions, longest request {longest_s:.1f} s"
        return case

    def poisoned(self, capacity: float) -> Case:
        """One request in five is wrong; the others must not notice."""
        case = Case("one request in five is bad")
        ended: Counter[str] = Counter()

        async def ask(client: AsyncClient, is_bad: bool, prompt: list[int]) -> None:
            wrong: dict[str, Any] = {"temperature": -1.0} if is_bad else {}
            try:
                result = await client.generate(
                    input_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **wrong
                )
            except MinisglError as error:
                ended[f"bad: {error.code}" if is_bad else f"good: {error.code}"] += 1
                return
            whole = result.num_output_tokens == NUM_TOKENS
            ended["bad: answered" if is_bad else f"good: {'whole' if whole else 'short'}"] += 1

        num = max(40, round(capacity * self._extent.load_s))
        drawn = [(index % 5 == 0, self._prompt()) for index in range(num)]
        self._ask_all(drawn, ask, self._num_clients)
        case.count = num
        ends = {"bad: INVALID_ARG": "refused", "good: whole": "answered"}
        for how, count in ended.items():
            case.expect(how in ends, f"{count} are {how}")
            case.ended[ends.get(how, "failed")] += count
        case.what = ", ".join(f"{count} {how}" for how, count in sorted(ended.items()))
        return case
