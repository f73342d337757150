"""``cuda/gemv.cu`` or ``cuda/expert_gemv.cu`` compiles for every cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.kernels.gemv_cut import (
    GemvCut,
    are_few,
    expert_codes_bytes,
    expert_gemv_cut,
    gemv_cut,
    takes_experts,
    usual_cut,
)
from minisgl_backend.kernels.packed_weight import CodesKind
from minisgl_backend.weight_format import Encoding, Layout, WeightFormat

INT4 = CodesKind(Encoding.INT4, 128, 1, True)
KINDS = [
    *(CodesKind(Encoding.INT4, group, 1, True) for group in (32, 64, 128)),
    CodesKind(Encoding.INT4, 0, 1, False),
    *(CodesKind(Encoding.INT8, group, 1, False) for group in (0, 32, 64, 128)),
    CodesKind(Encoding.E4M3, 128, 8, False),
    *(CodesKind(Encoding.E2M1, group, 1, False) for group in (128, 64)),
]


@given(
    strips=st.integers(1, 4096),
    blocks=st.integers(1, 256),
    codes=st.sampled_from(KINDS),
)
def test_all_can_be_compiled(strips: int, blocks: int, codes: CodesKind) -> None:
    height, in_features = 64 * strips, 128 * blocks
    cut = usual_cut(height, in_features, codes)
    group = 128 if codes.encoding is Encoding.E2M1 else codes.group or 128
    batches = -(-in_features // (cut.columns * group))
    assert cut.columns in (4, 8) and cut.columns * group % (512 // codes.encoding.bits) == 0
    assert 1 <= cut.warps <= min(batches, 5)  # each has something to do
    assert 1 <= cut.per_processor * cut.warps <= 20


@pytest.mark.parametrize(
    ("height", "in_features", "cut"),
    [
        (7168, 5120, GemvCut(8, 5, 4)),
        (5120, 5120, GemvCut(8, 5, 3)),
        (34816, 5120, GemvCut(8, 5, 4)),
        (5120, 17408, GemvCut(8, 5, 3)),
    ],
)
def test_weights_of_qwen3_14b(height: int, in_features: int, cut: GemvCut) -> None:
    """The cuts that were measured."""
    assert gemv_cut(height, in_features, INT4, is_added=False) == cut
    fp8 = CodesKind(Encoding.E4M3, 128, 8, False)
    assert gemv_cut(height, in_features, fp8, is_added=False) is None
    assert gemv_cut(height, in_features, None, is_added=True) is None


def test_small_weights() -> None:
    assert gemv_cut(4096, 2048, INT4, is_added=False) is None


@pytest.mark.parametrize(("height", "in_features"), [(2048, 4096), (4096, 4096)])
def test_plain_weights(height: int, in_features: int) -> None:
    """Those of Qwen3-30B-A3B and Llama-3.1-8B that are added to the residual stream."""
    assert gemv_cut(height, in_features, None, is_added=True) == GemvCut(2, 16, 1)
    assert gemv_cut(height, in_features, None, is_added=False) is None
    assert gemv_cut(height, in_features - 64, None, is_added=True) is None


@pytest.mark.parametrize(("height", "in_features"), [(2880, 4096), (2560, 4096)])
def test_plain_weights_that_leave_much_of_the_gpu_idle(height: int, in_features: int) -> None:
    """Those of gpt-oss-20b and Qwen3-4B: after one thread block for each multiprocessor, 48 and 28
    are left."""
    assert gemv_cut(height, in_features, None, is_added=True) is None


def test_few() -> None:
    """By plain weights the tokens count, by codes the choices, except those of a single token."""
    assert are_few(1, 22, None) and are_few(1, 22, Encoding.E4M3)
    assert are_few(4, 32, None) and not are_few(5, 5, None)
    assert are_few(16, 16, Encoding.E4M3) and not are_few(3, 17, Encoding.E4M3)


MXFP4 = CodesKind(Encoding.E2M1, group=128, shared_by=1, zeros=False)
NVFP4 = replace(MXFP4, group=64)
FP8 = CodesKind(Encoding.E4M3, group=128, shared_by=8, zeros=False)
OF_4_BITS = MXFP4, NVFP4, INT4


def shared_bytes(cut: GemvCut, codes: CodesKind | None) -> int:
    """The codes, scales and sums of a thread block of ``cuda/expert_gemv.cu``."""
    words = 0
    if codes is not None and codes.group:
        words = cut.columns * (128 // codes.group) * (16 // codes.shared_by)
    return expert_codes_bytes(cut, codes) + cut.warps * 4 * (words + 16)


@given(
    in_features=st.integers(1, 256).map(lambda chunks: 32 * chunks),
    codes=st.sampled_from([MXFP4, NVFP4, INT4, FP8, replace(FP8, group=0), None]),
)
def test_experts(in_features: int, codes: CodesKind | None) -> None:
    """Each warp has one batch, unless rows of a plain weight are very long. As many thread blocks
    as there are registers for fit into shared memory, each with the 1 KiB that CUDA takes."""
    cut = expert_gemv_cut(in_features, codes)
    assert cut is not None
    assert 1 <= cut.columns <= (2 if codes is None else 4)
    if codes is None and in_features > 4096:
        assert cut.warps == 8
    else:
        assert cut.warps == -(-in_features // (128 * cut.columns))
    assert 1 <= cut.per_processor <= 32
    # a batch keeps 56 or 80 registers of a thread, in units of 8
    assert cut.warps * cut.per_processor * (56 if codes in OF_4_BITS else 80) <= 2048
    assert cut.per_processor * (shared_bytes(cut, codes) + 1024) <= 228 * 1024


def test_measured_experts() -> None:
    """Those of gpt-oss-20b, and of Qwen3-30B-A3B in float8 and bfloat16."""
    assert expert_gemv_cut(2880, MXFP4) == GemvCut(4, 6, 6)
    assert expert_gemv_cut(2048, FP8) == GemvCut(4, 4, 6)
    assert expert_gemv_cut(768, FP8) == GemvCut(3, 2, 12)
    assert expert_gemv_cut(2048, None) == GemvCut(2, 8, 3)
    assert expert_gemv_cut(768, None) == GemvCut(2, 3, 8)
    assert expert_gemv_cut(512, None) == GemvCut(2, 2, 12)


@pytest.mark.parametrize(
    ("encoding", "block", "group", "fits"),
    [
        (Encoding.E4M3, (128, 128), 128, True),
        (Encoding.E4M3, (1, None), 0, True),
        (Encoding.E4M3, (64, 64), 64, False),
        (Encoding.INT4, (1, 128), 128, True),
        (Encoding.INT4, (1, 64), 64, False),
        (Encoding.INT4, (1, None), 0, False),
        (Encoding.INT8, (1, 128), 128, False),
        (Encoding.E2M1, (1, 32), 128, True),
        (Encoding.E2M1, (1, 16), 64, True),
    ],
)
def test_formats_of_experts(
    encoding: Encoding, block: tuple[int, int | None], group: int, fits: bool
) -> None:
    form = WeightFormat(layout=Layout.CONVERTED, encoding=encoding, block=block)
    assert takes_experts(form) is fits
    cut = expert_gemv_cut(2048, CodesKind(encoding, group, 1, zeros=False))
    assert (cut is not None) is fits


def test_which_experts() -> None:
    assert expert_gemv_cut(8192, MXFP4) is not None
    assert expert_gemv_cut(8224, MXFP4) is None
    assert expert_gemv_cut(2880, INT4) == expert_gemv_cut(2880, MXFP4)
    assert expert_gemv_cut(2880, replace(INT4, group=0)) is None
    assert expert_gemv_cut(14336, None) == GemvCut(2, 8, 3)
    assert expert_gemv_cut(2052, None) is None
    assert expert_gemv_cut(2880, replace(MXFP4, encoding=Encoding.INT8)) is None
    assert expert_gemv_cut(2048, replace(FP8, group=64)) is None
