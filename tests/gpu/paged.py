"""Paged keys and values, what attends to them, and what the answer must be.

Runs on any device, so that the checks themselves are tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import (
    AttentionSetting,
    AttentionShape,
    Chunks,
    DecodeRows,
    PagedAttention,
)
from minisgl_backend.kernels.paged_kv import KVScale, PagedKV
from minisgl_backend.request import IntArray

MAX_ROWS = 40
MAX_POSITIONS = 320
FP8 = torch.float8_e4m3fn
SCALE = KVScale(0.25, 2.0)
"""For float8 pages: powers of two, which change no digit, and different for keys and values."""


@dataclass(frozen=True)
class Case:
    """A shape to try attention with: 8 query heads, or two groups if 8 is not a multiple. With
    ``latent_dim`` there is one KV head for all heads of a group."""

    page_size: int
    group: int
    head_dim: int
    window: int | None = None
    fp8: bool = False
    sinks: bool = False
    cap: float = 0.0
    sections: bool = False
    latent_dim: int | None = None

    def __str__(self) -> str:
        words = [f"page{self.page_size}", f"group{self.group}", f"dim{self.head_dim}"]
        words += [f"window{self.window}"] * (self.window is not None)
        words += ["fp8"] * self.fp8 + ["sinks"] * self.sinks + ["sections"] * self.sections
        words += ["capped"] * (self.cap != 0)
        words += [f"latent{self.latent_dim}"] * (self.latent_dim is not None)
        return "-".join(words)

    @property
    def num_heads(self) -> int:
        if self.latent_dim is not None:
            return self.group
        return 2 * self.group if 8 % self.group else 8

    def setting(self, dtype: torch.dtype, device: torch.device) -> AttentionSetting:
        shape = AttentionShape(
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads // self.group,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            cap=self.cap,
            windows=(self.window,),
            sections=self.sections,
            sinks=self.sinks,
            latent_dim=self.latent_dim,
        )
        return AttentionSetting(
            shape=shape,
            page_size=self.page_size,
            max_sequence_length=MAX_POSITIONS,
            dtype=dtype,
            kv_dtype=FP8 if self.fp8 else dtype,
            max_batch_size=MAX_ROWS,
            max_captured_batch_size=MAX_ROWS,
            device=device,
        )


@dataclass(frozen=True)
class Paged:
    """Rows over shuffled pages, and the same keys and values in order, as they are read back."""

    setting: AttentionSetting
    kv: PagedKV
    page_table: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, lengths: Sequence[int], setting: AttentionSetting) -> Paged:
        """Random keys and values of ``lengths`` positions, one length per row."""
        shape, page_size, device = setting.shape, setting.page_size, setting.device
        is_fp8 = setting.kv_dtype == FP8
        scale = SCALE if is_fp8 else KVScale()
        num_pages = setting.max_pages * len(lengths)
        table = torch.randperm(num_pages, device=device).view(len(lengths), -1)
        # memory that was never written may hold anything finite
        dims = (num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        caches = [torch.full(dims, 7.0, device=device) for _ in range(2)]
        in_order: list[list[Tensor]] = [[], []]
        for cache, factor, found in zip(caches, (scale.k, scale.v), in_order, strict=True):
            for row, length in enumerate(lengths):
                position = torch.arange(length, device=device)
                x = torch.randn(length, *dims[2:], device=device) / factor
                x = x.to(setting.kv_dtype).float()
                cache[table[row, position // page_size], position % page_size] = x
                found.append(x * factor)
        keys, values = (cache.to(setting.kv_dtype) for cache in caches)
        if shape.latent_dim is not None:
            values = keys[..., : shape.latent_dim]
            scale = KVScale(scale.k, scale.k)
            in_order[1] = [of_row[..., : shape.latent_dim] for of_row in in_order[0]]
        on_device = torch.tensor([[scale.k], [scale.v]], device=device) if is_fp8 else (None, None)
        k_scale, v_scale = on_device
        # some sinks take hardly any weight, others nearly all
        sinks = torch.linspace(-3, 9, shape.num_heads, device=device).to(setting.dtype)
        kv = PagedKV(
            keys=keys,
            values=values,
            k_scale=k_scale,
            v_scale=v_scale,
            scale=scale,
            sinks=sinks if shape.sinks else None,
        )
        return cls(setting, kv, table.int(), *in_order)

    def queries(self, num_tokens: int) -> Tensor:
        """Random queries, whose heads lie next to those of keys and values, as in a model."""
        shape = self.setting.shape
        heads = shape.num_heads + 2 * shape.num_kv_heads
        packed = torch.randn(num_tokens, heads, shape.head_dim, device=self.setting.device)
        return packed.to(self.setting.dtype)[:, : shape.num_heads]

    def empty_out(self, q: Tensor) -> Tensor:
        """Memory for the attention of these queries."""
        return q.new_empty(*q.shape[:2], self.kv.values.shape[-1])

    def int32(self, values: Sequence[int] | IntArray) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.setting.device)

    def expected(self, q: Tensor, row: int, end: int) -> Tensor:
        """Attention for the last ``len(q)`` of a row's ``end`` positions, [len(q), heads, dim]."""
        shape = self.setting.shape
        position = torch.arange(end, device=q.device)
        query = position[end - len(q) :, None]
        seen = position <= query
        window = shape.windows[0]
        if window is not None and shape.sections:
            seen &= position >= query // window * window
        elif window is not None:
            seen &= position > query - window
        keys, values = self.keys[row][:end], self.values[row][:end]
        mask = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, float("-inf"))[None]
        if (sinks := self.kv.sinks) is not None:  # one more position, which holds only zeros
            keys, values = (F.pad(x, (0, 0, 0, 0, 1, 0)) for x in (keys, values))
            of_sinks = sinks.float()[:, None, None].expand(-1, len(q), 1)
            mask = torch.cat([of_sinks, mask.expand(len(sinks), -1, -1)], dim=2)
        if cap := shape.cap:
            heads = q.float().unflatten(1, (shape.num_kv_heads, -1))
            scores = torch.einsum("thgd,nhd->hgtn", heads, keys) * shape.scale
            weights = (cap * (scores / cap).tanh() + mask).softmax(dim=-1)
            return torch.einsum("hgtn,nhd->thgd", weights, values).flatten(1, 2).to(q.dtype)
        out = F.scaled_dot_product_attention(
            q.float().transpose(0, 1),
            keys.transpose(0, 1),
            values.transpose(0, 1),
            attn_mask=mask,
            scale=shape.scale,
            enable_gqa=True,
        )
        return out.transpose(0, 1).to(q.dtype)


@dataclass(frozen=True)
class Prompts:
    """Prompt chunks: some begin a row, others follow what is already there. With sections, each is
    cut to its part in the last section."""

    paged: Paged
    q: Tensor
    rows: list[int]
    ends: list[int]
    offsets: IntArray

    @classmethod
    def of(cls, setting: AttentionSetting) -> Prompts:
        rows, ends, lengths = (
            [3, 0, 5, 1, 2, 4],
            [130, 17, 300, 64, 1, 220],
            [130, 9, 41, 1, 1, 128],
        )
        if (section := setting.shape.section) is not None:
            within = [(end - 1) % section + 1 for end in ends]
            lengths = [min(both) for both in zip(lengths, within, strict=True)]
        by_row = [end for _, end in sorted(zip(rows, ends, strict=True))]
        paged = Paged.of(by_row, setting)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(paged, paged.queries(sum(lengths)), rows, ends, offsets)

    def chunks(self) -> Chunks:
        return Chunks(
            rows=self.paged.int32(self.rows),
            offsets=self.paged.int32(self.offsets),
            ends=self.paged.int32(self.ends),
            page_table=self.paged.page_table,
            host_offsets=self.offsets,
            host_ends=np.array(self.ends, np.int32),
            max_length=int(np.diff(self.offsets).max()),
            max_end=max(self.ends),
        )

    def attend(self, backend: PagedAttention) -> Tensor:
        out = self.paged.empty_out(self.q)
        backend.prefill.plan_chunks(self.chunks())(out, self.q, self.paged.kv, 0)
        return out

    def attend_as_captured(self, backend: PagedAttention, between: Tensor) -> Tensor:
        """As in a step to be captured: the host knows no lengths, ``between`` (0 or more tokens
        that belong to no chunk) stands before and after the chunks, and an empty chunk follows each
        chunk. Returns all tokens."""
        num_tokens, count = len(self.q), len(between)
        q = self.paged.queries(num_tokens + 2 * count)
        q[count : count + num_tokens] = self.q
        with_empty = np.stack([self.rows, self.ends], axis=1)
        with_empty = np.stack([with_empty, np.zeros_like(with_empty)], axis=1).reshape(-1, 2)
        chunks = Chunks(
            rows=self.paged.int32(with_empty[:, 0]),
            offsets=self.paged.int32(count + np.repeat(self.offsets, 2)[1:]),
            ends=self.paged.int32(with_empty[:, 1]),
            page_table=self.paged.page_table,
            max_length=len(q),
            max_end=self.paged.setting.max_pages * self.paged.setting.page_size,
        )
        nothing = self.paged.empty_out(self.q).fill_(torch.nan)
        out = torch.cat([between, nothing, between])
        backend.prefill.plan_chunks(chunks)(out, q, self.paged.kv, 0)
        return out

    def expected(self) -> Tensor:
        runs = zip(self.rows, self.ends, pairwise(self.offsets.tolist()), strict=True)
        parts = [self.paged.expected(self.q[a:b], row, end) for row, end, (a, b) in runs]
        return torch.cat(parts)


@dataclass(frozen=True)
class Inputs:
    """What a decode step reads: ``lengths`` and ``host_lengths`` are the same numbers."""

    rows: Tensor
    lengths: Tensor
    host_lengths: IntArray
    q: Tensor


class Decoding:
    """A decode step of ``num_rows`` out of ``num_rows + 2`` rows, whose inputs can be changed under
    a captured graph."""

    CAPACITY = (300, 1, 129, 64, 16, 250, 33)

    def __init__(self, setting: AttentionSetting, num_rows: int):
        assert num_rows <= MAX_ROWS
        self._capacity = np.resize(np.array(self.CAPACITY, np.int32), num_rows + 2)
        self.paged = Paged.of(self._capacity.tolist(), setting)
        # like the padding that graphs are captured with
        self._now = self._inputs(np.zeros(num_rows, np.int32), np.ones(num_rows, np.int32))

    def inputs(self, seed: int) -> Inputs:
        """Some of the rows, each at some position, with random queries; one is at its end."""
        rng = np.random.default_rng(seed)
        rows = rng.permutation(len(self._capacity))[:-2].astype(np.int32)
        lengths = rng.integers(1, self._capacity[rows], endpoint=True, dtype=np.int32)
        lengths[0] = self._capacity[rows[0]]
        return self._inputs(rows, lengths)

    def _inputs(self, rows: IntArray, lengths: IntArray) -> Inputs:
        paged = self.paged
        return Inputs(paged.int32(rows), paged.int32(lengths), lengths, paged.queries(len(rows)))

    def take(self, inputs: Inputs) -> None:
        """Copy ``inputs`` into what the step reads, without waiting for the device."""
        self._now.rows.copy_(inputs.rows)
        self._now.lengths.copy_(inputs.lengths)
        self._now.q.copy_(inputs.q)

    def rows(self, host_lengths: IntArray | None) -> DecodeRows:
        return DecodeRows(
            rows=self._now.rows,
            lengths=self._now.lengths,
            page_table=self.paged.page_table,
            host_lengths=host_lengths,
        )

    def attend(self, backend: PagedAttention, host_lengths: IntArray | None) -> Tensor:
        """Without ``host_lengths``, as in a step to be captured."""
        attend_rows = backend.decode.plan_rows(self.rows(host_lengths))
        q = self._now.q
        out = self.paged.empty_out(q)
        attend_rows(out, q, self.paged.kv, 0)
        return out

    def expected(self, inputs: Inputs) -> Tensor:
        found = zip(inputs.q, inputs.rows.tolist(), inputs.lengths.tolist(), strict=True)
        return torch.cat([self.paged.expected(q[None], row, end) for q, row, end in found])


def assert_tokens_close(actual: Tensor, expected: Tensor, *, limit: float) -> None:
    """Compare token by token, so that a large one cannot hide a small one; [num_tokens, ...]."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    wanted = expected.double().flatten(1)
    errors = (actual.double().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.max()) < limit  # NaN is not below it
