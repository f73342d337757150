"""The table of angles of the rotary position embedding (RoFormer, arXiv 2104.09864).

An entry of the table depends only on its position, not on the sequence, so that cached pages are
valid for every request that shares them. For this reason, ``dynamic`` scaling rotates position p as
transformers does if p is the sequence's last position.

All frequencies are computed in float32, with operations in the same order as in transformers, so
that the tables are equal bit by bit. Must not know sequences, or how a rotation is applied
(``kernels.rope_store``).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minisgl_backend.models.rope_spec import QueryGrowth, RopeSpec


def rotary_table(
    spec: RopeSpec | None, head_dim: int, num_positions: int, device: torch.device
) -> Tensor:
    """The cosines of each position's rotary_dim / 2 angles, and then their sines.

    float32[num_positions, rotary_dim]. Without a ``spec`` all angles are 0: nothing rotates.
    """
    if spec is None:
        half = torch.ones(num_positions, head_dim // 2)
        return torch.cat([half, torch.zeros_like(half)], dim=1).to(device)
    positions = torch.arange(num_positions, dtype=torch.float32)
    rotary_dim = spec.dims(head_dim)
    frequencies = inverse_frequencies(spec, rotary_dim)
    angles = positions.unsqueeze(1) * frequencies  # [num_positions, rotary_dim / 2]
    if spec.scaling == "dynamic" and num_positions > spec.max_positions:
        beyond = torch.arange(spec.max_positions, num_positions)
        stretched = _dynamic_frequencies(spec, rotary_dim, beyond + 1)
        angles[spec.max_positions :] = positions[spec.max_positions :].unsqueeze(1) * stretched
    sines = -angles.sin() if spec.reversed else angles.sin()
    table = torch.cat([angles.cos(), sines], dim=1) * spec.attention_factor
    return table.to(device)


def query_scales(growth: QueryGrowth, num_positions: int, device: torch.device) -> Tensor | None:
    """The factors of queries at each position, float32[num_positions]; None: all are 1."""
    if not growth.factor or num_positions - 1 + growth.first < growth.period:
        return None
    periods = torch.floor((torch.arange(num_positions) + growth.first) / growth.period)
    return (1 + growth.factor * torch.log(1 + periods)).to(device)


def inverse_frequencies(spec: RopeSpec, rotary_dim: int) -> Tensor:
    """Radians per position, float32[rotary_dim / 2], for sequences up to ``max_positions``."""
    exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
    frequencies = 1.0 / (spec.theta**exponents)
    if spec.scaling == "proportional":
        frequencies[int(spec.rotated * rotary_dim // 2) :] = 0
        return frequencies / spec.factor
    if spec.scaling == "linear":
        return frequencies / spec.factor
    if spec.scaling == "llama3":
        return _llama3_frequencies(spec, frequencies)
    if spec.scaling == "longrope":
        return 1.0 / (torch.tensor(spec.short_factors) * spec.theta**exponents)
    if spec.scaling == "yarn":
        return _yarn_frequencies(spec, rotary_dim, spec.theta**exponents)
    return frequencies


def _dynamic_frequencies(spec: RopeSpec, rotary_dim: int, lengths: Tensor) -> Tensor:
    """The same for sequences of int64[num_lengths] tokens: float32[num_lengths, rotary_dim / 2]."""
    stretch = (spec.factor * lengths / spec.max_positions) - (spec.factor - 1)
    # only the power is in float64, as in transformers: angles magnify its rounding error
    theta = spec.theta * (stretch.double() ** (rotary_dim / (rotary_dim - 2))).float()
    exponents = torch.arange(0, rotary_dim, 2).float() / rotary_dim
    return 1.0 / (theta.unsqueeze(1) ** exponents)


def _llama3_frequencies(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Divide the frequencies of long wavelengths, keep those of short ones, blend in between.

    A wavelength, in tokens, is long above context / ``low_freq_factor`` and short below
    context / ``high_freq_factor`` (Llama 3.1). If these are equal, nothing is in between (Llama 4).
    """
    context = spec.original_max_positions or spec.max_positions
    low, high = spec.low_freq_factor, spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    divided = torch.where(wavelengths > context / low, frequencies / spec.factor, frequencies)
    if low == high:
        return divided
    share = (context / wavelengths - low) / (high - low)
    blended = (1 - share) * divided / spec.factor + share * divided
    between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(between, blended, divided)


def _yarn_frequencies(spec: RopeSpec, rotary_dim: int, wavelengths: Tensor) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, and blend in between (arXiv 2309.00071).

    Slow ones turn less than ``beta_slow`` times over the original context, fast ones more than
    ``beta_fast`` times. ``wavelengths`` is theta to the exponents, float32[rotary_dim / 2].
    """
    context = spec.original_max_positions or spec.max_positions
    low = _yarn_dimension(spec.beta_fast, rotary_dim, spec.theta, context)
    high = _yarn_dimension(spec.beta_slow, rotary_dim, spec.theta, context)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # an empty ramp would divide by zero
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (spec.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _yarn_dimension(turns: float, rotary_dim: int, theta: float, context: int) -> float:
    """The dimension, as a fraction, whose angle makes this number of ``turns`` over the context."""
    return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
