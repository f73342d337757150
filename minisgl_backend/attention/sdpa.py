"""The backend ``sdpa``: it gathers the pages of each run, then calls PyTorch's scaled dot product.

It is the only backend on a CPU, and the reference for the others on a GPU: it supports every dtype,
page size, window and number of heads. Latents are gathered once: whole keys are taken as values,
and only those columns of the result are kept that belong to values. It needs lengths on the host,
so its steps are never captured.

A *run* is a row's part of the step: a chunk, or one decoded token. Runs are cut into *blocks* of
queries, so that masks stay small. Blocks of similar size are padded into a *segment*, which takes
one gather and one SDPA call per layer. Normally all decoding rows are one segment.

Pages that a group of decoding rows shares are gathered once for all of them, and the rows' queries
form one matrix (Hydragen, arXiv 2402.05099). The other pages of each row are in segments as before.
Both leave *partial* results, which are merged by the sums of their weights. This is done only on a
CPU, where PyTorch's kernel returns these sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.attention.base import AttentionSetting, Chunks, DecodeRows, LayerAttention
from minisgl_backend.attention.gathered import gathered
from minisgl_backend.attention.query_blocks import Blocks
from minisgl_backend.device.base import HostArray
from minisgl_backend.kernels.activation import soft_cap_reference
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.plan import NO_GROUPS, Groups
from minisgl_backend.request import IntArray

_LEAST_SAVED: Final = 2**18
"""The fewest elements of keys and values, per layer, that reading a group's pages together must
save. With at least this many it was faster (on one core of an AMD EPYC)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """B blocks of at most L queries over at most T positions, padded.

    ``tokens`` [B * L] are the flat indices of the queries (padding repeats a block's last), or a
    slice if they are consecutive. ``pages`` [B * P], P * page_size == T; a block with fewer than P
    pages repeats its last. ``masks`` [B, 1, G * L, T], for each window, are added to the scores;
    there are G query heads per KV head.
    """

    tokens: Tensor | slice
    pages: Tensor
    num_blocks: int
    masks: dict[int | None, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """T positions that n decoding rows share, of which each sees at least one.

    ``tokens`` [n] are the rows' flat indices; ``pages`` [P], P * page_size == T. ``mask``
    [1, 1, n * G, T] is added to the scores of G query heads per KV head; None if all rows see all
    positions.
    """

    tokens: Tensor
    pages: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Partial:
    """Attention of decoding rows over some of the positions that they see, [n, num_kv_heads, G,
    head_dim], and the logarithms of the sums of weights, [n, num_kv_heads, G]."""

    values: Tensor
    logarithms: Tensor

    def put(self, at: Tensor | slice, part: _Partial) -> None:
        """Set the results of the rows ``at``."""
        self.values[at], self.logarithms[at] = part.values.to(self.values.dtype), part.logarithms

    def merge(self, at: Tensor, part: _Partial) -> None:
        """Merge the attention of the rows ``at`` over further positions."""
        before = self.logarithms[at]
        both = torch.logaddexp(before, part.logarithms)
        kept, added = (before - both).exp_()[..., None], (part.logarithms - both).exp_()[..., None]
        self.put(at, _Partial(self.values[at] * kept + part.values * added, both))


class SdpaAttention:
    """``PrefillAttention`` and ``DecodeAttention`` by ``scaled_dot_product_attention``."""

    def __init__(self, setting: AttentionSetting):
        shape = setting.shape
        self._shape = shape
        self._page_size = setting.page_size
        self._dtype = setting.dtype
        self._device = setting.device
        self._heads_per_kv = shape.num_heads // shape.num_kv_heads
        self._windows = setting.windows

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        assert chunks.host_offsets is not None  # such steps are not captured
        assert chunks.host_ends is not None
        offsets = chunks.host_offsets.astype(np.int64)
        blocks = Blocks.of_runs(
            offsets[:-1], np.diff(offsets), chunks.host_ends.astype(np.int64), self._heads_per_kv
        )
        begins = np.zeros(len(chunks.host_ends), np.int64)
        segments = self._segments(blocks, begins, chunks.rows, chunks.page_table)
        return partial(self._attend, segments)

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        assert rows.host_lengths is not None
        ends = rows.host_lengths.astype(np.int64)
        begins = np.zeros(len(ends), np.int64)  # how many pages each row reads with others
        groups: list[tuple[IntArray, int, int]] = []
        for members, end in _members_and_ends(
            rows.groups if self._device.type == "cpu" else NO_GROUPS
        ):
            begin = int(begins[members[0]])  # the same for all members, which share what is before
            if self._pays(len(members), end - begin):
                groups.append((members, begin, end))
                begins[members] = end

        def segments(index: HostArray) -> list[_Segment]:
            own = ends[index] - begins[index] * self._page_size
            blocks = Blocks(index, index, np.ones(len(index), np.int64), own)
            return self._segments(blocks, begins, rows.rows, rows.page_table)

        grouped, alone = np.flatnonzero(begins), np.flatnonzero(begins == 0)
        attend_alone = partial(self._attend, segments(alone))
        if not len(grouped):
            return attend_alone
        shared = {
            window: [self._shared(rows, *group, window) for group in groups]
            for window in self._windows
        }
        attend_grouped = partial(self._attend_grouped, segments(grouped), shared, grouped)

        def attend(out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
            attend_alone(out, q, kv, layer)
            attend_grouped(out, q, kv, layer)

        return attend

    def _pays(self, num_rows: int, num_pages: int) -> bool:
        """Whether reading pages once for ``num_rows`` saves more than it costs."""
        shape = self._shape
        per_position = shape.tensors_per_layer * shape.num_kv_heads * shape.head_dim
        saved = (num_rows - 1) * num_pages * self._page_size * per_position
        return saved >= _LEAST_SAVED

    def _segments(
        self, blocks: Blocks, begins: HostArray, rows: Tensor, page_table: Tensor
    ) -> list[_Segment]:
        """``begins``: the first page of each run, from which its positions are counted."""
        return [
            self._segment(group, begins, rows, page_table)
            for group in blocks.groups(self._heads_per_kv)
        ]

    def _shared(
        self, rows: DecodeRows, members: IntArray, begin: int, end: int, window: int | None
    ) -> _Shared | None:
        """The pages of a group that at least one member sees through the window; None if there are
        no such pages."""
        assert rows.host_lengths is not None
        size, mask = self._page_size, None
        if window is not None:
            first_seen = rows.host_lengths[members] - window
            members = members[first_seen < end * size]
            if not len(members):
                return None
            first_seen = first_seen[first_seen < end * size]
            begin = max(begin, int(first_seen.min()) // size)
            hidden = np.arange(begin * size, end * size) < first_seen[:, None]  # [n, T]
            if hidden.any():
                by_head = torch.from_numpy(np.repeat(hidden, self._heads_per_kv, axis=0))
                mask = torch.zeros(by_head.shape, dtype=self._dtype)
                mask.masked_fill_(by_head, float("-inf"))
        row = rows.rows[int(members[0])]
        return _Shared(
            self._upload(members.astype(np.int64)),
            rows.page_table[row, begin:end],
            None if mask is None else mask[None, None],
        )

    def _attend(
        self, segments: Sequence[_Segment], out: Tensor, q: Tensor, kv: PagedKV, layer: int
    ) -> None:
        window, scale = self._shape.windows[layer], self._shape.scale
        for segment in segments:
            # [B, num_kv_heads, T, head_dim]
            keys, values = _gather_both(kv, segment.pages, segment.num_blocks, q.dtype)
            queries = self._fold(q[segment.tokens], segment.num_blocks)
            mask = segment.masks[window]
            if kv.sinks is None and not self._shape.cap:
                attended = F.scaled_dot_product_attention(
                    queries, keys, values, attn_mask=mask, scale=scale
                )
            else:
                attended, logarithms = self._with_logarithms(queries, keys, values, mask)
            if kv.sinks is not None:
                # [num_kv_heads, G * L], as queries are folded
                sinks = kv.sinks.view(self._shape.num_kv_heads, -1).repeat_interleave(
                    queries.shape[2] // self._heads_per_kv, dim=1
                )
                attended = _beside_sinks(attended, logarithms, sinks)
            attended = self._unfold(attended)  # [B * L, num_heads, head_dim]
            # Of whole keys only the latents. Padding repeats a real query, so it writes the same
            # result again.
            out[segment.tokens] = attended[..., : out.shape[-1]]

    def _attend_grouped(
        self,
        segments: Sequence[_Segment],
        shared: Mapping[int | None, Sequence[_Shared | None]],
        grouped: HostArray,
        out: Tensor,
        q: Tensor,
        kv: PagedKV,
        layer: int,
    ) -> None:
        """Attention of the rows ``grouped``. ``segments`` have what each row reads alone, which is
        at least one position."""
        window = self._shape.windows[layer]
        # [num_rows, num_kv_heads, G, head_dim]
        queries = q.reshape(len(q), self._shape.num_kv_heads, -1, self._shape.head_dim)
        exact = torch.promote_types(q.dtype, torch.float32)
        found = _Partial(
            torch.empty_like(queries, dtype=exact),
            queries.new_empty(queries.shape[:3], dtype=exact),
        )
        for segment in segments:
            keys, values = _gather_both(kv, segment.pages, segment.num_blocks, q.dtype)
            mask = segment.masks[window]
            own = self._with_logarithms(queries[segment.tokens], keys, values, mask)
            found.put(segment.tokens, _Partial(*own))
        for part in shared[window]:
            if part is None:
                continue
            # [1, num_kv_heads, T, head_dim]
            keys, values = _gather_both(kv, part.pages, 1, q.dtype)
            # all rows as one matrix per KV head: [1, num_kv_heads, n * G, head_dim]
            together = queries[part.tokens].transpose(0, 1).flatten(1, 2)[None]
            both = self._with_logarithms(together, keys, values, part.mask)
            by_row = (len(queries[0]), len(part.tokens), queries.shape[2])
            out_of_part, logarithms = (
                x.reshape(*by_row, *x.shape[3:]).transpose(0, 1) for x in both
            )
            found.merge(part.tokens, _Partial(out_of_part, logarithms))
        index = self._upload(grouped)
        attended = found.values[index]
        if kv.sinks is not None:
            of_heads = kv.sinks.view(self._shape.num_kv_heads, -1)
            attended = _beside_sinks(attended, found.logarithms[index], of_heads)
        # of whole keys only the latents
        out[index] = attended.flatten(1, 2)[..., : out.shape[-1]].to(out.dtype)

    def _with_logarithms(
        self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The result of ``scaled_dot_product_attention``, [B, heads, L, head_dim], and the
        logarithms of the sums of weights, [B, heads, L], which that function does not return. If
        scores are bounded, which it does not know either, PyTorch computes one step at a time."""
        scale = self._shape.scale
        if cap := self._shape.cap:
            scores = at_least_float32(q) @ at_least_float32(keys).mT * scale  # [B, heads, L, T]
            soft_cap_reference(scores, cap)
            scores = scores if mask is None else scores + mask
            return scores.softmax(dim=-1).to(q.dtype) @ values, scores.logsumexp(dim=-1)
        if self._device.type != "cpu":
            scores = (q @ keys.mT).float() * scale  # [B, heads, L, T]
            scores = scores if mask is None else scores + mask
            attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
            return attended, scores.logsumexp(dim=-1)
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out: Tensor
        out, logarithms = attend(q, keys, values, 0.0, False, attn_mask=mask, scale=scale)
        return out, logarithms

    def _fold(self, q: Tensor, num_blocks: int) -> Tensor:
        """[B * L, num_heads, head_dim] -> [B, num_kv_heads, G * L, head_dim].

        The heads that share a KV head become its queries, so that keys and values need not be
        repeated for each head.
        """
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        if q.shape[0] == num_blocks:  # single queries
            return q.view(num_blocks, kv_heads, -1, head_dim)
        q = q.reshape(num_blocks, -1, kv_heads, self._heads_per_kv, head_dim)
        return q.permute(0, 2, 3, 1, 4).reshape(num_blocks, kv_heads, -1, head_dim)

    def _unfold(self, x: Tensor) -> Tensor:
        """The inverse of ``_fold``."""
        num_blocks, kv_heads, num_queries, head_dim = x.shape
        if num_queries == self._heads_per_kv:
            return x.flatten(1, 2)
        x = x.reshape(num_blocks, kv_heads, self._heads_per_kv, -1, head_dim)
        return x.permute(0, 3, 1, 2, 4).reshape(-1, kv_heads * self._heads_per_kv, head_dim)

    def _segment(
        self, blocks: Blocks, begins: HostArray, rows: Tensor, page_table: Tensor
    ) -> _Segment:
        num_blocks, longest = len(blocks.runs), int(blocks.lengths.max())
        counts = -(-blocks.ends // self._page_size)  # pages of each block
        num_pages = int(counts.max())
        # Padding repeats a block's last query, and its last page.
        steps = np.minimum(np.arange(longest), blocks.lengths[:, None] - 1)  # [B, L]
        columns = np.minimum(np.arange(num_pages), counts[:, None] - 1)  # [B, P]
        columns += begins[blocks.runs, None]
        tokens = (blocks.tokens[:, None] + steps).reshape(-1)
        positions = self._upload((blocks.ends - blocks.lengths)[:, None] + steps)
        first = int(tokens[0])
        are_consecutive = bool((tokens == np.arange(first, first + len(tokens))).all())
        block_rows = rows.index_select(0, self._upload(blocks.runs))  # [B]
        return _Segment(
            tokens=slice(first, first + len(tokens)) if are_consecutive else self._upload(tokens),
            pages=page_table[block_rows.long()[:, None], self._upload(columns)].flatten(),
            num_blocks=num_blocks,
            masks={
                window: self._mask(positions, num_pages * self._page_size, window)
                for window in self._windows
            },
        )

    def _mask(self, positions: Tensor, num_keys: int, window: int | None) -> Tensor:
        """int64[B, L] query positions -> [B, 1, G * L, num_keys]: 0 if seen, else -inf."""
        keys = torch.arange(num_keys, device=self._device)
        queries = positions[:, None, :, None]  # [B, 1, L, 1]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        num_queries = positions.shape[1]
        if num_queries == 1:
            return mask  # broadcast over the G heads
        return mask.repeat(1, 1, self._heads_per_kv, 1)

    def _upload(self, array: HostArray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _gather_both(
    kv: PagedKV, wanted: Tensor, num_blocks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values by ``_gather``. Of latents these are one tensor, whose last columns are no
    values."""
    keys = _gather(kv.keys, wanted, num_blocks, dtype, kv.k_scale)
    if kv.has_latents:
        return keys, keys
    return keys, _gather(kv.values, wanted, num_blocks, dtype, kv.v_scale)


def _gather(
    pages: Tensor, wanted: Tensor, num_blocks: int, dtype: torch.dtype, scale: Tensor | None
) -> Tensor:
    """[num_pages + 1, page_size, kv_heads, head_dim] -> [B, kv_heads, T, head_dim] of ``dtype``."""
    found = gathered(pages.view(pages.shape[0], -1), wanted, scale, dtype)
    return found.view(num_blocks, -1, *pages.shape[2:]).transpose(1, 2)


def _beside_sinks(attended: Tensor, logarithms: Tensor, sinks: Tensor) -> Tensor:
    """Attention to keys alone, [..., head_dim], changed as if the sinks were in its softmax.

    ``logarithms`` [...] are those of the sums of weights; ``sinks`` are broadcast to them.
    """
    return attended * (logarithms - sinks).sigmoid()[..., None].to(attended.dtype)


def _members_and_ends(groups: Groups) -> Iterator[tuple[IntArray, int]]:
    """For each group: the members, and the index of the page after the shared ones."""
    members = np.split(groups.members, np.cumsum(groups.sizes))[: len(groups.sizes)]
    yield from zip(members, groups.ends.tolist(), strict=True)
