"""Wrappers work like the parts that they wrap."""

from __future__ import annotations

import random

import pytest

from minisgl_backend.cache.radix_cache import RadixCache
from minisgl_backend.request import EMPTY
from minisgl_backend.scheduling.scheduler import Scheduler, SchedulerConfig
from minisgl_kit.wrappers import CacheWrapper, SchedulerWrapper
from tests.fakes.harness import Harness, random_setup, run_randomly


@pytest.mark.parametrize("seed", range(20))
def test_a_planner_over_a_wrapped_cache_plans_the_same(seed: int) -> None:
    rng = random.Random(seed)
    setup = random_setup(rng)
    run_randomly(Harness(setup, lambda: CacheWrapper(setup.make_cache())), rng, check=True)


def test_wrappers_outlive_what_they_wrap() -> None:
    """A planner that starts anew has the same wrappers around an empty planner and cache."""
    first = RadixCache(num_pages=8, page_size=4)
    cache = CacheWrapper(first)
    planner = SchedulerWrapper(Scheduler(cache, SchedulerConfig()))
    wrapped = planner.wrapped
    cache.grow(cache.acquire(EMPTY, ""), 32)
    assert planner.renewed() is planner
    assert planner.wrapped is not wrapped
    assert cache.wrapped is not first
    assert cache.num_free == 8
