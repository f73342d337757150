"""The table of how rows are sampled, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl_backend.kernels.sampling_table import COLUMNS, SamplingTable


def test_rows_of_an_empty_table_are_greedy_and_ask_for_nothing() -> None:
    table = SamplingTable.empty(3, 7, torch.device("cpu"))
    off = {name: 0.0 for name in COLUMNS} | {"top_p": 1.0, "repetition": 1.0}
    assert {name: table.column(name).tolist() for name in COLUMNS} == {
        name: [value] * 3 for name, value in off.items()
    }
    assert table.marks.dtype == torch.int32 and table.bias.dtype == torch.float32
    assert not table.marks.any() and not table.bias.any() and not table.seeds.any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_lines_of_a_cpu_take_memory_once_they_are_written() -> None:
    before = _resident_bytes()
    table = SamplingTable.empty(500, 150_000, torch.device("cpu"))
    assert table.num_bytes(500, 150_000) == 500 * (8 * 150_000 + 4 * 4_688)
    assert _resident_bytes() - before < 50_000_000
    table.marks.fill_(1)
    assert _resident_bytes() - before > 250_000_000


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
