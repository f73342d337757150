"""NaN stays with the request that computed it: pages that may hold it are cleared, and no others.

Prompts are computed in small chunks and often aborted in the middle, before any token has been
sampled after what they wrote. The pool is so small that each page is used again and again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from minisgl_backend.cache.kv import Lease, Verified
from minisgl_backend.cache.pages import PagePool
from minisgl_backend.cache.radix import Node, RadixTree
from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.request import EMPTY, Failed, IntArray, Request, RequestId, SamplingParams
from tests.fakes.executor import Model, expected_tokens, tokens_of
from tests.fakes.harness import Harness, Setup, with_host
from tests.properties.effort import examples
from tests.properties.workloads import workloads

NUM_SEEDS = examples(60)


def scarce(rng: random.Random, model: Model) -> Setup:
    """Few pages, small chunks."""
    page_size = rng.choice([4, 16])
    window = rng.choice([None, None, page_size, 2 * page_size])
    return Setup(
        page_size=page_size,
        num_pages=8,
        max_sequence_length=8 * page_size,
        num_rows=rng.choice([2, 4]),
        max_prefill_tokens=rng.choice([3, page_size]),
        cache=rng.choice(["radix", "radix", "naive"]),
        depth=rng.choice([1, 2, 3]),
        window=window,
        num_window_pages=rng.choice([4, 6]),
        model=model,
    )


def request(rng: random.Random, setup: Setup, number: int) -> Request:
    """A prompt of several pages; each page of it is one of two."""
    pages = rng.choices([1, 2], k=rng.randint(1, 6))
    prompt = [token for token in pages for _ in range(setup.page_size)] + [0, 0]
    most = setup.max_sequence_length - len(prompt)
    return Request(
        id=RequestId(number),
        prompt=tokens_of(prompt),
        sampling=SamplingParams(max_tokens=rng.randint(1, most), seed=number),
    )


def run(harness: Harness, rng: random.Random, requests: list[Request]) -> None:
    """Serve the requests, and abort many of them."""
    for request in requests:
        harness.add(request)
    while harness.scheduler.has_work() or harness.num_in_flight:
        if rng.random() < 0.15 and (live := harness.live()):
            harness.abort(rng.choice(live[:4]))
        harness.step()
        harness.check()


def unchanged(setup: Setup) -> Setup:
    """Without prefixes in main memory."""
    return setup


def with_ample_host(setup: Setup) -> Setup:
    """With room for all prefixes there."""
    return replace(with_host(setup), num_host_slots=100)


def run_with_nan(seed: int, changed: Callable[[Setup], Setup] = unchanged) -> Harness:
    """Some positions of some requests are NaN. Each gets its own tokens and its own failure."""
    rng = random.Random(seed)
    setup = changed(scarce(rng, Model(vocabulary=50, nan_kv_every=60)))
    harness = Harness(setup)
    run(harness, rng, [request(rng, setup, number) for number in range(12)])
    harness.verify()
    return harness


def run_with_faults(seed: int, changed: Callable[[Setup], Setup] = unchanged) -> Harness:
    """Requests run while any position may become NaN; afterwards none does.

    Then each prompt is served again, alone and twice. The first time it may find pages that the
    faults left. If it fails because of them, they are gone the second time.
    """
    rng = random.Random(seed)
    setup = changed(scarce(rng, Model(vocabulary=50)))
    harness = Harness(setup)
    harness.executor.is_hit = lambda: rng.random() < 0.02
    run(harness, rng, [request(rng, setup, number) for number in range(8)])
    harness.executor.is_hit = lambda: False
    first = list(harness.records.values())
    for record in first:
        for _ in range(2):
            again = replace(record.request, id=RequestId(len(harness.records)))
            harness.add(again)
            harness.drain()
        assert harness.records[again.id].tokens == expected_tokens(again, setup.model)
    # a prompt that shares no page gets them all
    stranger = Request(
        id=RequestId(len(harness.records)),
        prompt=tokens_of([7] * (setup.max_sequence_length - 1)),
        sampling=SamplingParams(max_tokens=1),
    )
    harness.add(stranger)
    harness.drain()
    assert not isinstance(harness.records[stranger.id].ending, Failed)
    harness.verify_idle()
    return harness


def test_nan_reaches_no_other_request() -> None:
    harnesses = [run_with_nan(seed) for seed in range(NUM_SEEDS)]
    assert sum(harness.executor.num_cleared for harness in harnesses) > NUM_SEEDS
    endings = [record.ending for harness in harnesses for record in harness.records.values()]
    assert sum(isinstance(ending, Failed) for ending in endings) > NUM_SEEDS


def test_what_a_fault_leaves_behind_fails_a_prompt_at_most_once() -> None:
    for seed in range(NUM_SEEDS // 3):
        run_with_faults(seed)


def test_main_memory_keeps_no_nan() -> None:
    """It would break the executor's own rule, or spread to requests that load it."""
    harnesses = [run_with_nan(seed, with_ample_host) for seed in range(NUM_SEEDS)]
    harnesses += [run_with_nan(seed, with_host) for seed in range(NUM_SEEDS // 2)]
    harnesses += [run_with_faults(seed, with_ample_host) for seed in range(NUM_SEEDS // 3)]
    assert sum(harness.executor.num_loaded for harness in harnesses) > NUM_SEEDS


@settings(max_examples=examples(60))
@given(workloads())
def test_pages_that_are_finite_are_not_cleared(workload: tuple[Setup, list[Request]]) -> None:
    """No request fails or is aborted or retracted, and no two compute the same thing at once.

    Each samples a token, which shows that what it has written is finite.
    """
    setup, requests = workload
    # a prompt that is scored is computed again although it is cached
    requests = [request for request in requests if request.sampling.num_prompt_logprobs is None]
    model = replace(setup.model, nan_every=0, nan_kv_every=0)
    # without window pages, which are cleared if they are given back before a token is sampled, and
    # without recurrent states, with which cached positions are computed again
    ample = replace(
        setup, num_pages=50 * setup.num_pages, window=None, num_snapshots=None, model=model
    )
    for each in (replace(ample, cache="naive"), replace(ample, cache="radix", num_rows=1)):
        harness = Harness(each)
        for request in requests:
            harness.add(request)
        harness.drain()
        harness.verify()
        assert harness.executor.num_cleared == 0


def never_cleared(patch: pytest.MonkeyPatch) -> None:
    """Pages that may hold NaN are handed out as they are."""
    patch.setattr(PagePool, "take_broken", lambda self: EMPTY)


def trusted_unsampled(patch: pytest.MonkeyPatch) -> None:
    """Pages count as finite as soon as they are written, before a token is sampled."""
    for cache in (RadixCache, RadixCache.__base__):
        publish = cache.__dict__["publish"]

        def publish_verified(
            self: RadixCache,
            lease: Lease,
            tokens: IntArray,
            *,
            verified: Verified,
            publish: Callable[..., range] = publish,
        ) -> range:
            return publish(self, lease, tokens, verified=Verified.ALL)

        patch.setattr(cache, "publish", publish_verified)


def forgotten_by_eviction(patch: pytest.MonkeyPatch) -> None:
    """Pages that are evicted count as finite."""
    evict = RadixCache._make_room

    def make_room(self: RadixCache, num_pages: int) -> bool:
        trusted = self._pool.num_suspect
        self._pool.num_suspect = 0  # then freed pages are not looked at
        fits = evict(self, num_pages)
        self._pool._is_suspect &= ~self._pool._is_free
        self._pool.num_suspect = min(trusted, int(self._pool._is_suspect.sum()))
        return fits

    patch.setattr(RadixCache, "_make_room", make_room)


def kept_after_failure(patch: pytest.MonkeyPatch) -> None:
    """The pages of a request that failed can still be found."""

    def unpin_only(self: RadixTree, node: Node, is_suspect: Callable[[IntArray], bool]) -> IntArray:
        return self.unpin(node)

    patch.setattr(RadixTree, "drop", unpin_only)


@pytest.mark.parametrize(
    ("inject", "workload"),
    [
        (never_cleared, run_with_nan),
        (trusted_unsampled, run_with_nan),
        (forgotten_by_eviction, run_with_nan),
        (kept_after_failure, run_with_faults),
    ],
)
def test_the_oracle_notices(
    inject: Callable[[pytest.MonkeyPatch], None],
    workload: Callable[[int], Harness],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inject(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(NUM_SEEDS):
            workload(seed)
