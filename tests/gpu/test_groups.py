"""Engines on a GPU that read the shared pages of rows together: tokens are as good as without.

Groups form while prompts are computed beside decoding rows, split, and dissolve as requests end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl_backend.attention.own_kernels import CudaDecode
from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.execution.chunk_graphs import ChunkGraphs
from minisgl_backend.execution.decode_graphs import DecodeGraphs
from minisgl_backend.kernels.dispatch import is_interpreted
from minisgl_backend.kernels.shared_attention import SharedTable
from minisgl_backend.plan import Groups
from minisgl_backend.request import EMPTY, IntArray, Request, SamplingParams
from tests.conformance.checkpoints import VOCAB_SIZE, write_broad_checkpoint
from tests.gpu.test_executor import StartedCollector, assert_good_in_bf16, shortfalls

pytestmark = pytest.mark.skipif(is_interpreted(), reason="needs a CUDA device")

CONTEXT = 768
WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 250,
    "layer_types": ["sliding_attention", "full_attention"],
}


def written(folder: Path, **changes: Any) -> Any:
    """Write a checkpoint; returns its model as the reference."""
    return write_broad_checkpoint(folder, max_position_embeddings=CONTEXT, **changes)


def prompts() -> list[IntArray]:
    """Prompts of three groups, whose members share 160 or 240 tokens; some members of one share 240
    more. Plans name groups from 128 positions that each member need not read. The last prompt has
    so many tokens of its own that a step with all prompts is a large one."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> IntArray:
        return rng.integers(0, VOCAB_SIZE, count).astype(np.int32)

    stems = [tokens(240), tokens(160), tokens(160)]
    longer = tokens(240)
    found = [
        np.concatenate([stem, longer if group == 1 and index % 2 else EMPTY, tokens(1 + index)])
        for group, stem in enumerate(stems)
        for index in range(16)
    ]
    found = [found[index] for index in rng.permutation(len(found))]
    found[-1] = np.concatenate([found[-1], tokens(256)])
    return found


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """The sizes of the groups that steps of each kind took, however small."""
    found: dict[str, list[int]] = {"all": [], "decode": [], "chunk": []}
    monkeypatch.setattr(SharedTable, "saved_us", lambda *args, **kwargs: 1.0)
    take = CudaDecode.take_groups

    def counted(self: CudaDecode, groups: Groups) -> bool:
        found["all"] += groups.sizes.tolist()
        return take(self, groups)

    monkeypatch.setattr(CudaDecode, "take_groups", counted)
    for kind, graphs in (("decode", DecodeGraphs), ("chunk", ChunkGraphs)):

        def watched(
            self: Any, *args: Any, kind: str = kind, replay: Any = graphs.replay, **options: Any
        ) -> object:
            before = len(found["all"])
            output = replay(self, *args, **options)
            found[kind] += found["all"][before:]
            return output

        monkeypatch.setattr(graphs, "replay", watched)
    yield found


def serve_in_waves(folder: Path, prompts: list[IntArray], **options: Any) -> list[StartedCollector]:
    """Serve half of the prompts, and the others while those decode; answers vary in length."""
    wanted = {"group_attention": True, **options}
    chosen = {"max_running_requests": 64, "num_pages": 2048, "max_prefill_tokens": 1024, **wanted}
    engine = build_engine(
        EngineOptions(model=str(folder), device="cuda", max_sequence_length=CONTEXT, **chosen)
    )
    sinks = [StartedCollector() for _ in prompts]
    half = len(prompts) // 2
    try:
        for index, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
            if index == half:  # so that groups decode beside the chunks of the others
                assert all(before.started.wait(120) for before in sinks[:half])
            count = 20 + index % 24 + (300 if index < half else 0)
            sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            engine.submit(Request(id=engine.new_id(), prompt=prompt, sampling=sampling), sink)
        for sink in sinks:
            assert sink.done.wait(120)
            assert sink.error is None
    finally:
        engine.close(drain_s=0)
    return sinks


@pytest.mark.parametrize("changes", [{"max_running_requests": 1}, {"max_sequence_length": 16}])
def test_engines_start_whose_rows_cannot_share(changes: dict[str, int], tmp_path: Path) -> None:
    """There is only one row, or a row has only one page."""
    written(tmp_path)
    options: dict[str, Any] = {"max_sequence_length": CONTEXT, "num_pages": 256, **changes}
    build_engine(EngineOptions(model=str(tmp_path), device="cuda", **options)).close(drain_s=0)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap": False, "max_prefill_tokens": 300},
    {"num_pages": 130},
    {"cuda_graph_max_batch_size": 0},
    {"cuda_graph_max_tokens": 0},
    {"max_running_requests": 9},
    {"page_size": 32},
]


@pytest.mark.parametrize(
    ("model", "options"),
    [*(({}, options) for options in OPTIONS), *((WINDOW, options) for options in OPTIONS[:3])],
    ids=lambda value: "window" if value is WINDOW else str(value),
)
def test_pages_read_together_give_tokens_as_good(
    model: dict[str, Any],
    options: dict[str, Any],
    taken: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    reference = written(tmp_path, **model).to(dtype).float()
    asked = prompts()
    sinks = serve_in_waves(tmp_path, asked, **options)
    assert_good_in_bf16(reference, asked, [sink.tokens for sink in sinks])
    assert len({*taken["all"]}) > 3
    assert bool(taken["decode"]) == ("cuda_graph_max_batch_size" not in options)
    if not options:
        assert taken["chunk"]


def test_float8_pages_read_together(taken: dict[str, list[int]], tmp_path: Path) -> None:
    """Tokens are as near to those of fp32 as if each row reads its float8 pages alone."""
    reference = written(tmp_path).bfloat16().float()
    asked = prompts()
    spread = []
    for together in (True, False):
        sinks = serve_in_waves(tmp_path, asked, kv_cache_dtype="fp8_e4m3", group_attention=together)
        below = np.array(shortfalls(reference, asked, [sink.tokens for sink in sinks]))
        assert np.mean(below > 0) < 0.3
        spread.append(below.max())
    assert taken["decode"]
    assert spread[0] < 2 * spread[1] + 0.1


def test_groups_that_do_not_pay_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of this test are far too small to pay."""
    written(tmp_path)
    asked, take = list[bool](), CudaDecode.take_groups

    def watched(self: CudaDecode, groups: Groups) -> bool:
        asked.append(len(groups.sizes) > 0)
        assert not take(self, groups)
        return False

    monkeypatch.setattr(CudaDecode, "take_groups", watched)
    serve_in_waves(tmp_path, prompts())
    assert any(asked)
