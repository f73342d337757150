"""Graphs are captured largest first, and report their progress, their cost and a lack of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.execution import capture
from minisgl_backend.progress import Progress, unseen


class FakeGraph:
    """``Graph``."""

    def __init__(self, output: str) -> None:
        self.output = output


class FakeGpu:
    """A ``Device`` that records what is done; each graph takes 1 GiB of 40."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.free_bytes = 40 * 2**30

    def free_memory(self) -> int:
        return self.free_bytes

    def capture(self, work: Callable[[], str]) -> FakeGraph:
        self.done.append("begin")
        output = work()
        self.done.append("end")
        self.free_bytes -= 2**30
        return FakeGraph(output)


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu()


def captured(
    gpu: FakeGpu,
    sizes: Sequence[int],
    work: Callable[[int], str],
    progress: Progress = unseen,
) -> capture.Captured[str]:
    device: Any = gpu
    return capture.capture(
        device,
        "number of tokens",
        sizes,
        work,
        prepare=lambda size: gpu.done.append(f"prepare {size}"),
        option="cuda_graph_x",
        progress=progress,
    )


def test_graphs_are_captured_largest_first_after_a_run_that_is_not_captured(gpu: FakeGpu) -> None:
    def work(size: int) -> str:
        gpu.done.append(f"work {size}")
        return f"output {size}"

    graphs = captured(gpu, [16, 64, 32], work).graphs
    assert {size: graph.output for size, graph in graphs.items()} == {
        64: "output 64",
        32: "output 32",
        16: "output 16",
    }
    expected = []
    for size in (64, 32, 16):
        expected += [f"prepare {size}", f"work {size}", "begin", f"work {size}", "end"]
    assert gpu.done == expected


def test_progress_of_captures_is_their_sizes(gpu: FakeGpu) -> None:
    reports: list[str] = []

    @contextmanager
    def progress(what: str, num_items: int) -> Iterator[Callable[[str], None]]:
        assert (what, num_items) == ("capturing CUDA graphs by number of tokens", 2)
        yield reports.append

    captured(gpu, [32, 64], str, progress)
    assert reports == ["number of tokens 64", "number of tokens 32"]


def test_what_captures_took_is_kept_and_logged(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        both = captured(gpu, [32, 64], str)
    assert (len(both.graphs), both.num_bytes) == (2, 2 * 2**30)
    assert both.seconds >= 0
    assert "captured 2 CUDA graphs by number of tokens" in caplog.text
    assert "take 2.00 GiB; 38.00 GiB free" in caplog.text


def test_too_little_memory_for_graphs_names_the_option(gpu: FakeGpu) -> None:
    def work(size: int) -> str:
        if size == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return ""

    message = "number of tokens 32 does not fit .*, with 39.0 GiB free: .* or cuda_graph_x"
    with pytest.raises(ConfigError, match=message):
        captured(gpu, [32, 64], work)
