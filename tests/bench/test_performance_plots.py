"""The plots of docs/performance.md, made from figures as the commands write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from tools.performance_plots import (
    breakdown_figure,
    decode_figure,
    main,
    prefill_figure,
    scaling_figure,
    throughput_figure,
)

FILES: dict[str, dict[str, Any]] = {
    "offline-small": {"tokens_per_s": 24_000.0},
    "server-small": {"tokens_per_s": 21_000.0, "offline_tokens_per_s": 24_000.0},
    "prefill-small": {
        "rows": [
            {"prompt_tokens": 128, "median_ms": 2.5},
            {"prompt_tokens": 4000, "median_ms": 12.3},
        ]
    },
    "decode-small": {
        "rows": [
            {"batch": 1, "mean_ms": 0.8, "replay_ms": 0.7, "eager_ms": 9.0},
            {"batch": 300, "mean_ms": 5.0, "replay_ms": "-", "eager_ms": 9.5},
        ]
    },
    "trace-small-decode": {"info": {"attention_share": 0.6, "gemm_share": 0.3}},
    "trace-small-offline": {"info": {"attention_share": 0.5, "idle_share": 0.1}},
    "scaling-small": {
        "rows": [
            {"ranks": 1, "comm": "-", "batch_1_ms": 8.0, "offline_tokens_per_s": 100.0},
            {"ranks": 2, "comm": "nccl", "batch_1_ms": 5.0, "offline_tokens_per_s": 180.0},
            {"ranks": 2, "comm": "pynccl", "batch_1_ms": "-", "offline_tokens_per_s": "-"},
        ]
    },
}
OTHERS: dict[str, dict[str, Any]] = {
    "offline-small": {"mini_sglang": 21_800},
    "prefill-small": {"mini_sglang_ms": {"128": 8.9}},
    "decode-small": {"mini_sglang_ms": {"1": 1.7}},
}


def test_bars_are_here_and_the_other_engine() -> None:
    (axes,) = throughput_figure(FILES, OTHERS).axes
    heights = [bar.get_height() for bars in axes.containers for bar in bars]
    assert heights == [24_000, 21_000, 21_800, 0]


def test_first_tokens_stand_beside_those_of_the_other_engine() -> None:
    (axes,) = prefill_figure(FILES, OTHERS).axes
    heights = [bar.get_height() for bars in axes.containers for bar in bars]
    assert heights == [2.5, 12.3, 8.9, 0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "4,000"]


def test_steps_without_a_graph_have_no_replay() -> None:
    (axes,) = decode_figure(FILES, OTHERS).axes
    step, replay, eager, other = axes.lines
    assert np.array_equal(step.get_xdata(), [1, 300])
    assert np.array_equal(replay.get_xdata(), [1])
    assert np.array_equal(eager.get_ydata(), [9.0, 9.5])
    assert np.array_equal(other.get_ydata(), [1.7])


def test_shares_of_a_trace_are_stacked() -> None:
    (axes,) = breakdown_figure(FILES).axes
    widths = {
        bars.get_label(): [round(bar.get_width()) for bar in bars] for bars in axes.containers
    }
    assert widths["attention"] == [50, 60]
    assert widths["GEMMs"] == [0, 30]
    assert widths["idle"] == [10, 0]


def test_lines_of_scaling_begin_with_one_rank() -> None:
    throughput, steps = scaling_figure(FILES).axes
    measured, ideal = throughput.lines
    assert np.array_equal(measured.get_ydata(), [100, 180])
    assert np.array_equal(ideal.get_ydata(), [100, 200])
    assert [bar.get_height() for bars in steps.containers for bar in bars] == [8, 5, 0]


def test_only_what_was_measured_is_drawn(tmp_path: Path) -> None:
    for name in ("decode-small", "trace-small-decode"):
        (tmp_path / f"{name}.json").write_text(json.dumps(FILES[name]), encoding="utf-8")
    result = CliRunner().invoke(main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["breakdown.png", "decode.png"]
