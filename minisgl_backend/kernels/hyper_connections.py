"""Hyper-connections (arXiv 2409.19606): what parts of layers read of several residual streams, and
how their outputs are added to these.

A part reads a weighted sum of a token's streams, and each stream takes the part's output times
another weight. Both kinds of weights are made of all of the token's streams: of ``mixes``, their
products with a learned matrix, divided by the root mean square of the streams.

    read weight   sigmoid(mix * scale + base) + eps
    write weight  magnitude * sigmoid(mix * scale + base) + eps

Weights and sums are in float32. Grids depend only on shapes, so launches may be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.kernels.dispatch import at_least_float32, use_triton


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamWeights:
    """Of what weights are made. ``matrix`` [num_mixes, num_streams * hidden_size] and ``base``
    [num_mixes] have num_streams rows for reading and then, unless nothing is written, as many for
    writing; ``scale`` [1 or 2] has a number for each kind. All are float32. ``norm_eps`` is that of
    the mean square."""

    matrix: Tensor
    base: Tensor
    scale: Tensor
    eps: float
    norm_eps: float
    magnitude: float = 1.0


def read_streams(
    streams: Tensor, weights: StreamWeights, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """What a part reads, [num_tokens, hidden_size], and the weights for writing, float32
    [num_tokens, num_streams or 0].

    ``streams`` [num_tokens, num_streams, hidden_size] is contiguous.
    """
    if not use_triton(streams):
        return read_streams_reference(streams, weights)
    from minisgl_backend.kernels.triton_kernels.stream_kernels import launch_read_streams

    num_tokens, num_streams, hidden_size = streams.shape
    out = streams.new_empty(num_tokens, hidden_size)
    num_written = len(weights.base) - num_streams
    for_writing = torch.empty((num_tokens, num_written), dtype=torch.float32, device=streams.device)
    launch_read_streams(
        out,
        for_writing,
        streams,
        matrix=weights.matrix,
        base=weights.base,
        scale=weights.scale,
        eps=weights.eps,
        norm_eps=weights.norm_eps,
        magnitude=weights.magnitude,
        pdl=pdl,
    )
    return out, for_writing


def read_streams_reference(streams: Tensor, weights: StreamWeights) -> tuple[Tensor, Tensor]:
    """The twin of ``read_streams``; float64 stays float64."""
    num_streams = streams.shape[1]
    wide = at_least_float32(streams)
    flat = wide.flatten(1)  # [num_tokens, num_streams * hidden_size]
    inverse = torch.rsqrt(flat.square().mean(dim=1, keepdim=True) + weights.norm_eps)
    mixes = flat @ weights.matrix.to(flat.dtype).T * inverse  # [num_tokens, num_mixes]
    for_reading, for_writing = (
        (part * scale + base).sigmoid_()
        for part, scale, base in zip(
            mixes.tensor_split([num_streams], dim=1),
            (weights.scale[0], weights.scale[-1]),
            weights.base.tensor_split([num_streams]),
            strict=True,
        )
    )
    read = (wide * (for_reading + weights.eps)[:, :, None]).sum(dim=1)
    return read.to(streams.dtype), weights.magnitude * for_writing + weights.eps


def add_to_streams(
    streams: Tensor, part: Tensor, for_writing: Tensor, *, pdl: bool = False
) -> None:
    """Add ``part`` [num_tokens, hidden_size] to each of ``streams`` [num_tokens, num_streams,
    hidden_size], times its weight [num_tokens, num_streams], in place. Both are contiguous."""
    if not use_triton(streams):
        add_to_streams_reference(streams, part, for_writing)
        return
    from minisgl_backend.kernels.triton_kernels.stream_kernels import launch_add_to_streams

    launch_add_to_streams(streams, part, for_writing, pdl=pdl)


def add_to_streams_reference(streams: Tensor, part: Tensor, for_writing: Tensor) -> None:
    """The twin of ``add_to_streams``."""
    added = at_least_float32(part)[:, None] * for_writing[:, :, None]
    streams.copy_(at_least_float32(streams) + added)
