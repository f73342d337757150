"""The adapter gauge: its labels, their bound, and a report that fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl_backend.tritonserver.adapter_gauge import AdapterGauge
from minisgl_backend.tritonserver.families import Families
from tests.fakes.pb_utils import Metric, MetricFamily


@pytest.fixture
def gauge() -> Iterator[AdapterGauge]:
    MetricFamily.families.clear()
    yield AdapterGauge(Families({"model": "demo"}), max_loras=4)


def told() -> dict[tuple[str, str], float]:
    """When each set of running and waiting adapters was last reported."""
    times = {}
    for key, metric in MetricFamily.families["vllm:lora_requests_info"].metrics.items():
        labels = dict(key)
        assert labels["max_lora"] == "4" and labels["model"] == "demo"
        names = labels["running_lora_adapters"], labels["waiting_lora_adapters"]
        times[names] = metric.current
    return times


def test_the_newest_set_has_the_latest_time(gauge: AdapterGauge) -> None:
    gauge.report(["b", "a"], ["c"])
    gauge.report([], [])
    gauge.report(["a", "b"], ["c"])
    times = told()
    assert times.keys() == {("a,b", "c"), ("", "")}
    assert times["a,b", "c"] > times["", ""] > 0


def test_sets_beyond_the_bound_are_one(gauge: AdapterGauge) -> None:
    for number in range(300):
        gauge.report([str(number)], [])
    times = told()
    assert len(times) == 257
    assert max(times, key=times.__getitem__) == ("(many)", "(many)")


def test_the_next_report_has_what_a_failed_one_missed(
    gauge: AdapterGauge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Metric, value: float) -> None:
        raise RuntimeError("no room in shared memory")

    with monkeypatch.context() as patch:
        patch.setattr(Metric, "set", fails)
        with pytest.raises(RuntimeError):
            gauge.report(["a"], [])
    gauge.report(["a"], [])
    assert told()["a", ""] > 0
