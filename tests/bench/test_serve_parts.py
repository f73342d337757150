"""The pure parts of the load generator: prompts, traces, moments, figures, plots."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import ClickException
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.errors import ConfigError
from minisgl_bench.serve import make_trace
from minisgl_bench.serve.figures import Measured, check_answered, emit, figures_of, objectives_of
from minisgl_bench.serve.plots import write_plots
from minisgl_bench.serve.workload import TraceEntry, Workload, calls_of_trace, read_trace
from minisgl_kit.calls import Call, Chunk, Outcome, calls_of_file, random_calls
from minisgl_kit.loads import closed_loop, poisson, replay
from minisgl_kit.report import percentiles

CONVERSATIONS = Path(__file__).parents[2] / "docs" / "benchmarks" / "conversations.jsonl"
CALL = Call(4, input_ids=[1, 2])

times = st.floats(0, 1e4, allow_nan=False)


def outcome(
    due_s: float, *chunks_s: float, tokens: int | None = None, error: str | None = None
) -> Outcome:
    ended_s = chunks_s[-1] if chunks_s else due_s + 1
    return Outcome(due_s, list(chunks_s), ended_s, error, 10, tokens)


# --- prompts -----------------------------------------------------------------------------------


@given(
    length=st.integers(1, 300),
    ratio=st.floats(0, 0.99),
    seed=st.integers(0, 2**32),
    variant=st.integers(0, 9),
)
def test_random_prompts(length: int, ratio: float, seed: int, variant: int) -> None:
    def calls(variant: int) -> list[Call]:
        return random_calls(
            5,
            input_length=length,
            output_length=2 * length,
            range_ratio=ratio,
            vocab_size=100_000,
            seed=seed,
            variant=variant,
        )

    ours, again, others = calls(variant), calls(variant), calls(variant + 1)
    assert ours == again
    for call, other in zip(ours, others, strict=True):
        assert call.input_ids is not None and other.input_ids is not None
        assert len(call.input_ids) == len(other.input_ids)
        assert call.max_tokens == other.max_tokens
        low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
        assert max(1, low) <= len(call.input_ids) <= high
        assert max(1, 2 * low - 1) <= call.max_tokens <= 2 * high
    assert [call.input_ids for call in ours] != [call.input_ids for call in others]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    lines = [
        {"prompt": "Once"},
        {"messages": messages, "max_tokens": 7},
        {"input_ids": [3, 4]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert calls_of_file(path, max_tokens=5) == [
        Call(5, text="Once"),
        Call(7, messages=messages),
        Call(5, input_ids=[3, 4]),
    ]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: "),
        ("[]", "line 2: not an object"),
        ('{"prompt": "a", "input_ids": [1]}', "needs one of prompt, messages and input_ids"),
        ('{"prompt": 7}', "needs one of prompt"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be an integer of at least 1"),
        ('{"prompt": "a", "temperatur": 0}', "unknown name 'temperatur'"),
    ],
)
def test_a_wrong_line_of_prompts_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "right"}\n' + line)
    with pytest.raises(ConfigError, match=complaint):
        calls_of_file(path, max_tokens=5)


def test_no_more_requests_than_a_file_has(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "first"}\n{"prompt": "second"}')
    with pytest.raises(ConfigError, match="has 2 requests, not 3"):
        Workload(prompts=path, requests=3).loads()
    assert [len(load.calls) for load in Workload(prompts=path, requests=1).loads()] == [1, 1, 1]


# --- traces ------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> tuple[int, list[TraceEntry]]:
    """A block size and entries whose hash ids may share prefixes."""
    block_size = draw(st.integers(1, 8))
    entries = []
    for _ in range(draw(st.integers(1, 6))):
        hash_ids = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        last = draw(st.integers(1, block_size))
        length = (len(hash_ids) - 1) * block_size + last if hash_ids else last
        entries.append(TraceEntry(draw(times), length, draw(st.integers(1, 9)), hash_ids))
    return block_size, entries


@given(traces(), st.integers(0, 3))
def test_prompts_share_what_the_trace_shares(
    trace: tuple[int, list[TraceEntry]], variant: int
) -> None:
    block_size, entries = trace
    calls = calls_of_trace(
        entries, block_size=block_size, vocab_size=2**30, seed=0, variant=variant
    )
    others = calls_of_trace(
        entries, block_size=block_size, vocab_size=2**30, seed=0, variant=variant + 1
    )
    for (entry, call), other in zip(zip(entries, calls, strict=True), others, strict=True):
        assert call.input_ids is not None and other.input_ids is not None
        assert len(call.input_ids) == entry.input_length
        assert call.max_tokens == entry.output_length
        assert call.input_ids[0] != other.input_ids[0]
    for one, a in zip(entries, calls, strict=True):
        for two, b in zip(entries, calls, strict=True):
            if one is two:
                continue
            assert a.input_ids is not None and b.input_ids is not None
            pairs = zip(one.hash_ids, two.hash_ids, strict=False)
            same = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
            num_blocks = min(len(one.hash_ids), len(two.hash_ids)) if same is None else same
            shared = min(num_blocks * block_size, one.input_length, two.input_length)
            assert a.input_ids[:shared] == b.input_ids[:shared]
            rest = list(zip(a.input_ids[shared:], b.input_ids[shared:], strict=False))
            assert not rest or rest[0][0] != rest[0][1]


def test_the_committed_trace_is_the_one_that_the_script_makes() -> None:
    lines = make_trace.make_trace(conversations=24, seconds=60, seed=0)
    assert [json.loads(line) for line in CONVERSATIONS.read_text().splitlines()] == lines
    entries = read_trace(CONVERSATIONS, block_size=make_trace.BLOCK_SIZE)
    assert len(entries) == len(lines) > 50
    assert entries[0].at_s == 0
    assert all(one.at_s <= two.at_s for one, two in pairwise(entries))


@pytest.mark.parametrize("option", ["--conversations=-1", "--seconds=0", "--seconds=nan"])
def test_a_trace_that_cannot_be_made(option: str) -> None:
    result = CliRunner().invoke(make_trace.main, [option])
    assert result.exit_code == 2, result.output
    assert option.split("=")[0] in result.output


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"timestamp": -1}, "timestamp must be a number of at least 0"),
        ({"timestamp": "now"}, "timestamp must be a number"),
        ({"timestamp": float("nan")}, "timestamp must be a number of at least 0"),
        ({"timestamp": float("inf")}, "timestamp must be a number of at least 0"),
        ({"timestamp": 10**400}, "timestamp must be a number of at least 0"),
        ({"input_length": 0}, "input_length must be an integer of at least 1"),
        ({"output_length": 1.5}, "output_length must be an integer"),
        ({"hash_ids": [1, -2]}, "hash_ids must be a list of integers of at least 0"),
        ({"hash_ids": [1, 2, 3]}, "600 tokens are 2 blocks of 512, but there are 3 hash_ids"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    right = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(right) + "\n" + json.dumps({**right, **change}))
    with pytest.raises(ConfigError, match=f"trace.jsonl, line 2: {complaint}"):
        read_trace(path, block_size=512)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"\n", "is empty"), (b"\xff\n", "line 1: 'utf-8' codec can't decode")],
)
def test_a_file_without_prompts_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        calls_of_file(path, max_tokens=3)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"trace.jsonl is empty"):
        read_trace(path, block_size=512)


# --- moments -----------------------------------------------------------------------------------


@given(rate=st.floats(0.01, 1000), seed=st.integers(0, 2**32))
def test_poisson_arrivals(rate: float, seed: int) -> None:
    load = poisson([CALL] * 400, rate, seed=seed)
    assert load.arrivals_s is not None and len(load.arrivals_s) == 400
    assert load == poisson([CALL] * 400, rate, seed=seed)
    gaps_s = np.diff([0.0, *load.arrivals_s])
    assert (gaps_s >= 0).all()
    # six standard deviations of the mean of 400 exponential gaps
    assert gaps_s.mean() * rate == pytest.approx(1, abs=6 / math.sqrt(400))


@given(st.lists(times, min_size=1, max_size=9), st.floats(0.01, 100))
def test_a_time_scale_stretches_all_moments(arrivals_s: list[float], scale: float) -> None:
    load = replay([CALL] * len(arrivals_s), arrivals_s, scale)
    assert load.arrivals_s == pytest.approx([scale * arrival_s for arrival_s in arrivals_s])


def test_loads_of_a_workload() -> None:
    loads = Workload(concurrency=[2], rate=[0.5, 4], requests=3).loads()
    assert [load.label for load in loads] == ["concurrency 2", "rate 0.5", "rate 4"]
    prompts = [load.calls[0].input_ids for load in loads]
    assert prompts[0] != prompts[1] != prompts[2]
    assert [load.concurrency for load in Workload().loads()] == [1, 4, 16]
    replayed = Workload(trace=CONVERSATIONS, block_size=32, time_scale=[1, 0.5], requests=4).loads()
    sparse, dense = (load.arrivals_s for load in replayed)
    assert sparse is not None and dense is not None and len(sparse) == 4
    assert dense[-1] == sparse[-1] / 2
    assert [len(load.calls) for load in Workload(trace=CONVERSATIONS, block_size=32).loads()] == [
        81
    ]
    closed = Workload(trace=CONVERSATIONS, block_size=32, concurrency=[3]).loads()
    assert [load.label for load in closed] == ["concurrency 3"]
    with pytest.raises(ConfigError, match="--time-scale needs --trace"):
        Workload(time_scale=[1]).loads()
    with pytest.raises(ConfigError, match="exclude each other"):
        Workload(prompts=CONVERSATIONS, trace=CONVERSATIONS).loads()


@pytest.mark.parametrize(
    ("option", "options"),
    [
        ("--input-len", {"input_len": 8, "prompts": CONVERSATIONS}),
        ("--range-ratio", {"range_ratio": 0.0, "prompts": CONVERSATIONS}),
        ("--input-len", {"input_len": 8, "trace": CONVERSATIONS}),
        ("--output-len", {"output_len": 8, "trace": CONVERSATIONS}),
        ("--block-size", {"block_size": 512}),
    ],
)
def test_lengths_that_would_not_count_are_refused(option: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{option} (does not go with|needs) --"):
        Workload(**options).loads()


# --- figures -----------------------------------------------------------------------------------


@given(st.lists(times, min_size=1))
def test_percentiles_are_ordered_and_among_the_values(values: list[float]) -> None:
    named = percentiles(values)
    assert min(values) <= named["p50"] <= named["p90"] <= named["p99"] <= max(values)
    if len(set(values)) == 1:
        assert named["p50"] == named["p99"] == values[0]
    assert min(values) <= named["mean"] * (1 + 1e-9) and named["mean"] <= max(values) * (1 + 1e-9)


def test_percentiles_of_known_values() -> None:
    assert percentiles(float(number) for number in range(101)) == {
        "p50": 50,
        "p90": 90,
        "p99": 99,
        "mean": 50,
    }
    assert percentiles([]) == {}


def test_chunks_add_up_to_an_outcome() -> None:
    one = Outcome(1.0)
    one.add(Chunk(True, 2, 9, 4), 1.5)
    one.add(Chunk(True, 3, 9, 4), 2.5)
    one.add(Chunk(False, 0), 3.0)
    one.ended_s = 3.0
    assert one.chunks_s == [1.5, 2.5]
    assert (one.num_input_tokens, one.num_output_tokens, one.num_cached_tokens) == (9, 5, 4)
    assert (one.ttft_ms, one.tpot_ms, one.e2e_ms) == (500, 250, 2000)
    nothing = Outcome(1.0, ended_s=2.0)
    assert (nothing.ttft_ms, nothing.tpot_ms) == (None, None)
    assert Outcome(1.0, [1.5], 2.0, num_output_tokens=1).tpot_ms is None


def test_figures_of_a_load() -> None:
    outcomes = [
        outcome(0.0, 0.1, 0.3, 0.5, tokens=5),  # ttft 100 ms, tpot 100 ms, e2e 500 ms
        outcome(1.0, 1.2, 1.8, tokens=3),  # ttft 200 ms, tpot 300 ms, e2e 800 ms
        outcome(2.0, error="UNAVAILABLE"),
        outcome(3.0, 3.5, error="INTERNAL"),
        outcome(3.0, error="UNAVAILABLE"),
    ]
    figures = figures_of(outcomes, {"ttft": 250, "tpot": 150})
    assert figures["errors"] == {"UNAVAILABLE": 2, "INTERNAL": 1}
    assert figures["seconds"] == 4
    assert figures["requests_per_s"] == 2 / 4
    assert figures["output_tokens_per_s"] == 8 / 4
    assert figures["tokens_per_chunk"] == 8 / 5
    assert figures["ttft_ms"]["p50"] == pytest.approx(150)
    assert figures["tpot_ms"]["mean"] == pytest.approx(200)
    assert figures["between_chunks_ms"]["p50"] == pytest.approx(200)
    assert figures["e2e_ms"]["mean"] == pytest.approx(650)
    assert figures["goodput_per_s"] == 1 / 4
    assert figures["goodput_share"] == 1 / 5
    assert "goodput_share" not in figures_of(outcomes, {})


def test_counts_that_a_server_does_not_send_are_unknown_not_zero(tmp_path: Path) -> None:
    """An endpoint of OpenAI's API may send no usage, or not say how much was cached."""
    nothing, usage = Outcome(0.0, [1.0, 2.0], 2.0), Outcome(0.0, [1.0, 2.0], 2.0)
    usage.add(Chunk(False, 3, 5), 2.0)
    unknown = figures_of([nothing], {})
    names = ("input_tokens", "output_tokens", "output_tokens_per_s", "tokens_per_chunk")
    assert [unknown[name] for name in (*names, "cached_share")] == [None] * 5
    known = figures_of([usage], {})
    assert [known[name] for name in (*names, "cached_share")] == [5, 3, 1.5, 1.5, None]
    load = closed_loop([CALL], 1)
    both = [Measured(load, [nothing], unknown), Measured(load, [usage], known)]
    assert len(write_plots(tmp_path, both, {})) == 2


@given(
    st.lists(
        st.builds(
            lambda due_s, first_s, gap_s, tokens, error: outcome(
                due_s, due_s + first_s, due_s + first_s + gap_s, tokens=tokens, error=error
            ),
            times,
            st.floats(0.001, 9),
            st.floats(0.001, 9),
            st.integers(1, 9),
            st.sampled_from([None, None, "INTERNAL"]),
        ),
        min_size=1,
        max_size=9,
    ),
    st.floats(1, 1e4),
    st.floats(1, 1e4),
)
def test_goodput(outcomes: list[Outcome], ttft_ms: float, e2e_ms: float) -> None:
    """Tighter bounds never let more through; a bound that excludes nothing lets all answers
    through."""
    answered = sum(one.error is None for one in outcomes) / len(outcomes)
    loose = figures_of(outcomes, {"ttft": ttft_ms})["goodput_share"]
    tight = figures_of(outcomes, {"ttft": ttft_ms, "e2e": e2e_ms})["goodput_share"]
    assert 0 <= tight <= loose <= answered
    assert figures_of(outcomes, {"ttft": 1e9})["goodput_share"] == answered
    assert figures_of(outcomes, {"ttft": 0})["goodput_share"] == 0


def test_objectives() -> None:
    assert objectives_of("ttft=200,tpot=12.5") == {"ttft": 200, "tpot": 12.5}
    assert objectives_of("") == {}
    with pytest.raises(ConfigError, match="ttft, tpot or e2e, got 'itl'"):
        objectives_of("itl=3")
    with pytest.raises(ConfigError, match="tpot must be a number of milliseconds, got 'fast'"):
        objectives_of("tpot=fast")
    for value in ("nan", "-3", "inf"):
        with pytest.raises(ConfigError, match="ttft must be a number of milliseconds"):
            objectives_of(f"ttft={value}")


# --- what is shown -----------------------------------------------------------------------------


def test_table_file_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answered = [outcome(0.0, 0.1, 0.3, tokens=5), outcome(1.0, 1.2, 1.8, tokens=3)]
    failed = [outcome(2.0, error="UNAVAILABLE"), outcome(2.0, error="UNAVAILABLE")]
    failed[0].reason, failed[1].reason = "the [queue] is full", "it is still full"
    objectives = {"ttft": 150.0, "tpot": 400.0}
    measured = [
        Measured(load, outcomes, figures_of(outcomes, objectives))
        for load, outcomes in (
            (closed_loop([CALL] * 2, 1), answered),
            (closed_loop([CALL] * 2, 2), failed),
        )
    ]
    emit(measured, {"server": "none"}, objectives, tmp_path / "figures.json", title="serve")
    table = capsys.readouterr().out
    assert "concurrency 1" in table and "errors UNAVAILABLE" in table
    assert "UNAVAILABLE: the [queue] is full" in table and "still" not in table
    assert "server none" in table and "ttft within 150 ms" in table
    content = json.loads((tmp_path / "figures.json").read_text())
    assert content["info"].keys() == {"server", "machine", "python", "ttft within", "tpot within"}
    rows = content["rows"]
    assert [(row["load"], row["level"]) for row in rows] == [("concurrency", 1), ("concurrency", 2)]
    assert rows[0]["ttft_ms"]["p50"] == pytest.approx(150)
    assert rows[1]["errors"] == {"UNAVAILABLE": 2}
    with pytest.raises(ClickException, match="no request was answered at concurrency 2"):
        check_answered(measured)
    check_answered(measured[:1])
    for path in write_plots(tmp_path, measured, objectives):
        assert path.read_bytes().startswith(b"\x89PNG\r\n")
