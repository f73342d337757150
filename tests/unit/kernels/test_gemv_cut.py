"""Every cut is one that ``cuda/gemv.cu`` compiles for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.kernels.gemv_cut import gemv_cut
from minisgl_backend.kernels.packed_weight import CodesKind
from minisgl_backend.weight_format import Encoding

KINDS = [
    *(CodesKind(Encoding.INT4, group, 1, True) for group in (32, 64, 128)),
    CodesKind(Encoding.INT4, 0, 1, False),
    *(CodesKind(Encoding.INT8, group, 1, False) for group in (0, 32, 64, 128)),
    CodesKind(Encoding.E4M3, 128, 8, False),
    CodesKind(Encoding.E2M1, 128, 1, False),
]


@given(
    strips=st.integers(1, 4096),
    blocks=st.integers(1, 256),
    codes=st.sampled_from(KINDS),
)
def test_all_can_be_compiled(strips: int, blocks: int, codes: CodesKind) -> None:
    height, in_features = 64 * strips, 128 * blocks
    cut = gemv_cut(height, in_features, codes)
    if cut is None:
        assert height * in_features <= 8 * 2**20
        return
    batch = cut.columns * (codes.group or 128)
    batches = -(-in_features // batch)
    assert cut.columns in (4, 8) and batch % (512 // codes.encoding.bits) == 0
    assert 1 <= cut.warps <= min(batches, 8)  # each has something to do
    assert -(-batches // cut.warps) == -(-batches // 8)  # and no more to do than with 8
    assert 1 <= cut.per_processor <= 16
