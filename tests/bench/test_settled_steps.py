"""Only steps in which all requests of a batch decode are measured."""

from __future__ import annotations

import pytest

from minisgl_bench.settled_steps import SETTLING, settled_steps_ms, spare_tokens


@pytest.mark.parametrize(("batch_size", "context"), [(1, 1), (1, 4096), (7, 300), (256, 256)])
def test_the_first_request_outlasts_the_measured_steps_of_the_last(
    batch_size: int, context: int
) -> None:
    """Steps that prefill compute 1,024 tokens; the first request decodes in each of them."""
    steps = 20
    num_tokens = steps + spare_tokens(batch_size, context, 1024)
    num_prefills = -(-batch_size * context // 1024)
    assert num_prefills + SETTLING + steps + 1 <= num_tokens


def test_as_many_steps_count_as_are_asked_for() -> None:
    settling = [0.5 * index for index in range(SETTLING)]
    times_s = [*settling, 10.0, 10.002, 10.005, 10.009, 20.0]
    assert settled_steps_ms(times_s, 3) == pytest.approx([2, 3, 4])
