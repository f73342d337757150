"""Hyper-connections against their twins."""

from __future__ import annotations

import pytest
import torch

from minisgl_backend.kernels import hyper_connections
from minisgl_backend.kernels.hyper_connections import StreamWeights
from tests.gpu.compare import assert_close


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize(("num_streams", "hidden_size"), [(4, 2816), (3, 72), (2, 1024)])
@pytest.mark.parametrize("writes", [True, False], ids=["of a part", "only read"])
def test_read_and_write(
    device: torch.device,
    dtype: torch.dtype,
    num_tokens: int,
    num_streams: int,
    hidden_size: int,
    writes: bool,
) -> None:
    num_kinds = 2 if writes else 1
    num_mixes, width = num_kinds * num_streams, num_streams * hidden_size
    weights = StreamWeights(
        matrix=torch.randn(num_mixes, width, device=device) / width**0.5,
        base=torch.randn(num_mixes, device=device),
        scale=torch.randn(num_kinds, device=device),
        eps=0.01,
        norm_eps=1e-5,
        magnitude=2.0,
    )
    streams = torch.randn(num_tokens, num_streams, hidden_size, device=device).to(dtype)
    read, for_writing = hyper_connections.read_streams(streams, weights)
    expected, of_twin = hyper_connections.read_streams_reference(streams, weights)
    assert_close(read, expected)
    torch.testing.assert_close(for_writing, of_twin, atol=1e-4, rtol=1e-4)
    if not writes:
        assert for_writing.shape == (num_tokens, 0)
        return
    part, written = torch.randn_like(read), streams.clone()
    hyper_connections.add_to_streams(streams, part, of_twin)
    hyper_connections.add_to_streams_reference(written, part, of_twin)
    assert_close(streams, written)
