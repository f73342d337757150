"""The table of a GPU trace, from traces written here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.main import main
from minisgl_bench.trace_table import (
    Kernel,
    kind_of,
    report_trace,
    short_name,
    tabulate,
)

FLASH = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::"
    "Mainloop<2, cute::tuple<cute::C<1>, cute::C<1>>>>>>(flash::FlashAttnFwdSm90<...>::Params)"
)


def _event(name: str, begin: float, duration: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": duration, "pid": 0, "tid": 7}


def test_shares_and_idle_time_add_up_though_kernels_overlap() -> None:
    table = tabulate(
        [
            Kernel("_gated_mul", 110, 10),
            Kernel("_decode_attention", 0, 60),
            Kernel("_qk_norm_rope_store", 50, 30),  # begins early and waits
            Kernel("_gated_mul", 55, 5),  # within another
            Kernel("_gated_mul", 90, 10),
        ]
    )
    assert table.wall_us == 120
    assert table.idle_us == 20
    assert next(iter(table.lines)) == "_decode_attention"
    silu = table.lines["_gated_mul"]
    assert (silu.count, silu.total_us, silu.own_us) == (3, 25, 20)
    assert table.lines["_qk_norm_rope_store"].own_us == 20
    assert sum(table.shares().values()) == pytest.approx(1)
    assert table.shares()["attention"] == pytest.approx(0.5)


def test_the_middle_half_of_all_steps_counts(tmp_path: Path) -> None:
    events = [_event("_prefill_attention", 0.0, 50.0)]
    for step in range(8):
        begin = 100.0 * (step + 1)
        events += [_event("_begin_decode", begin, 10.0), _event("_wide_linear", begin + 10, 30.0)]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    report = report_trace(trace, top=9, step="_begin_decode")
    assert report.info["steps"] == 4
    rows = {row["kernel"]: row for row in report.rows}
    assert rows.keys() == {"_begin_decode", "_wide_linear", "(no kernel runs)"}
    assert (rows["_wide_linear"]["count_a_step"], rows["_wide_linear"]["us_a_step"]) == (1, 30)
    with pytest.raises(click.ClickException, match="1 kernels named _prefill_attention"):
        report_trace(trace, top=9, step="_prefill_attention")


def test_kernels_of_a_step_in_order(tmp_path: Path) -> None:
    """The second half of a step: a kernel that waits, one within another, and cleared memory."""
    events = []
    for step in range(8):
        begin = 100.0 * step
        events += [
            _event("_begin_decode", begin, 10.0),
            _event("_rms_norm", begin + 10, 10.0),
            _event("_sum_outputs", begin + 20, 5.0),
            _event("_wide_linear", begin + 22, 20.0),
            _event("_choose", begin + 30, 4.0),
            _event("Memset (Device)", begin + 50, 1.0, cat="gpu_memset"),
        ]
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    command = ["bench", "trace-table", str(trace), "--in-order", "9", "--json", str(figures)]
    assert "needs --step" in CliRunner().invoke(main, command).output
    result = CliRunner().invoke(main, [*command, "--step", "_begin_decode"])
    assert result.exit_code == 0, result.output
    content = json.loads(figures.read_text(encoding="utf-8"))
    assert content["info"]["kernels_a_step"] == 6
    assert [tuple(row.values()) for row in content["rows"]] == [
        ("_wide_linear", 0, 20, 17),
        ("_choose", 8, 12, 0),
        ("Memset", 28, 29, 9),
    ]


@pytest.mark.parametrize(
    ("name", "short", "kind"),
    [
        ("_decode_attention", "_decode_attention", "attention"),
        ("_qk_norm_rope_store", "_qk_norm_rope_store", "norms"),
        ("_add_rms_norm_parts", "_add_rms_norm_parts", "norms"),
        ("_vector", "_vector", "gemm"),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "nvjet_tst_128x64_64x8_1x2_h_bz_TNT", "gemm"),
        (FLASH, "device_kernel<enable_sm90_or_later<FlashAttnFwdSm90>>", "attention"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>,"
            " std::array<char*, 1ul> >(int, at::native::FillFunctor<float>)",
            "vectorized_elementwise_kernel<FillFunctor>",
            "other",
        ),
        (
            "void at::native::(anonymous namespace)::indexSelect<c10::BFloat16, long, 2>(long)",
            "indexSelect",
            "other",
        ),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            "communication",
        ),
        ("_best_of_split", "_best_of_split", "sampling"),
    ],
)
def test_names_are_shortened_and_sorted(name: str, short: str, kind: str) -> None:
    assert short_name(name) == short
    assert kind_of(name) == kind


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_trace_becomes_a_table(suffix: str, tmp_path: Path) -> None:
    events = [
        _event("_wide_linear", 1000.0, 300.0),
        _event("cudaGraphLaunch", 900.0, 5.0, cat="cuda_runtime"),
        _event("_wide_linear", 1400.0, 500.0),
        _event("_choose", 1900.0, 100.0),
    ]
    trace = tmp_path / f"trace{suffix}"
    content = json.dumps({"traceEvents": events}).encode()
    trace.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    figures = tmp_path / "figures.json"
    command = ["bench", "trace-table", str(trace), "--top", "1", "--json", str(figures)]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    content_read = json.loads(figures.read_text(encoding="utf-8"))
    assert [row["kernel"] for row in content_read["rows"]] == ["_wide_linear", "(no kernel runs)"]
    first = content_read["rows"][0]
    assert (first["count"], first["total_ms"], first["mean_us"]) == (2, 0.8, 400.0)
    info = content_read["info"]
    assert info["wall_ms"] == 1.0
    assert (info["gemm_share"], info["sampling_share"], info["idle_share"]) == (0.8, 0.1, 0.1)


def test_a_packed_trace_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    content = gzip.compress(json.dumps({"traceEvents": []}).encode() * 100)
    trace = tmp_path / "trace.json.gz"
    for whole in (content[:-4], content[:20] + b"\xff" * 20):
        trace.write_bytes(whole)
        result = CliRunner().invoke(main, ["bench", "trace-table", str(trace)])
        assert result.exit_code == 1
        assert "trace.json.gz is no Chrome trace: " in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2", "no Chrome trace"),
        (b"[]", "no Chrome trace"),
        (b'{"traceEvents": 5}', "no Chrome trace"),
        (b'{"traceEvents": [1]}', "no Chrome trace"),
        (b'{"traceEvents": [{"cat": "kernel", "ph": "X"}]}', "no Chrome trace: KeyError: 'name'"),
        (b"\xff" * 1000, "trace.json is no Chrome trace: "),
        (b'{"traceEvents": []}', "no kernels"),
        (
            b'{"traceEvents": [{"cat": "kernel", "ph": "X", "name": "a", "ts": 1, "dur": 0}]}',
            "the kernels of the trace take no time",
        ),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_bytes(content)
    result = CliRunner().invoke(main, ["bench", "trace-table", str(trace)])
    assert result.exit_code == 1
    assert message in result.output and len(result.output) < 300
