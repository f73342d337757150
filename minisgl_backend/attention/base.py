"""The protocols of attention over pages, and their inputs, on every device.

A step's keys and values are in their pages before attention is computed. There is one protocol for
prompt chunks and one for decoding rows. A backend is a pair of implementations
(``PagedAttention``), which may come from different libraries. Each plans a step once and returns a
function for its layers.

A step to be captured in a CUDA graph has no host arrays: its kernels may depend only on values on
the device.

Knows positions, pages and shapes. Must not know requests, plans or how pages are allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.paged_kv import PagedKV
from minisgl_backend.plan import NO_GROUPS, Groups
from minisgl_backend.request import IntArray

if TYPE_CHECKING:  # ``models.spec`` imports this module and needs no torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The numbers of a layer's heads of queries and of keys and values, and the size of all."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def of_rank(self, num_ranks: int) -> LayerHeads:
        """The heads of one of ``num_ranks`` ranks; raises ``ConfigError`` if they do not split. If
        there are more ranks than KV heads, several ranks hold the same one."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
            raise ConfigError(
                f"{heads} attention heads and {kv_heads} key-value heads cannot be split evenly "
                f"over {num_ranks} tensor-parallel ranks"
            )
        return LayerHeads(heads // num_ranks, max(1, kv_heads // num_ranks), self.head_dim)


@dataclass(frozen=True, slots=True)
class ExpandedHeads:
    """The sizes of a head's key, rotated part included, and value, if they are made of a latent."""

    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class IndexShape:
    """How tokens choose the ``top_k`` positions that they attend to (``kernels.indexer``).

    ``key_dim`` is the size of index keys. ``layers`` are those that have any; each other layer
    takes the positions that the last one before it chose.
    """

    top_k: int
    key_dim: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """The heads of one rank.

    ``windows`` has one entry per layer: the number of positions that a token sees, including its
    own; None for all positions up to its own. With ``sections`` windows do not slide: they are
    sections of the sequence, all of one size, and a token sees nothing before its section
    (``attention.sections``). The scores, q k^T, are multiplied by ``scale``. Unless ``cap`` c is 0,
    it then bounds scores s as c tanh(s / c). With ``sinks`` each layer has sinks (``PagedKV``).
    ``by_layer`` has one entry per layer, unless all layers have the same heads. ``window_pages``:
    layers with windows have their own pages and page table (``cache.windows``); never if
    ``one_pool``. ``latent_dim``: pages hold latents, and a head's values are the first
    ``latent_dim`` elements of its keys (``PagedKV``); ``expanded`` are the keys and values that can
    be made of a latent. ``index``: how positions are chosen; None if tokens attend to all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    windows: tuple[int | None, ...]
    cap: float = 0.0
    sections: bool = False
    sinks: bool = False
    by_layer: tuple[LayerHeads, ...] = ()
    window_pages: bool = False
    one_pool: bool = False
    latent_dim: int | None = None
    expanded: ExpandedHeads | None = None
    index: IndexShape | None = None

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def window(self) -> int | None:
        """The largest window of a layer; None if all layers see all positions."""
        return max((window for window in self.windows if window is not None), default=None)

    def for_context(self, context: int) -> AttentionShape:
        """The shape for sequences of up to ``context`` tokens: with window pages if sequences can
        be longer than the windows, and otherwise without sections; and without a choice of
        positions if all would be chosen."""
        is_longer = self.window is not None and self.window < context
        window_pages = is_longer and not self.one_pool
        index = None if self.index is None or context <= self.index.top_k else self.index
        return replace(
            self,
            sections=self.sections and is_longer,
            window_pages=window_pages,
            index=index,
        )

    @property
    def section(self) -> int | None:
        """The size of the sections, if there are any."""
        return self.window if self.sections else None

    @property
    def tensors_per_layer(self) -> int:
        """Keys and values are two; values that are part of the keys are none of their own."""
        return 2 if self.latent_dim is None else 1

    def numbers_per_position(self, *, window_pages: bool) -> int:
        """How many numbers pages hold for a position, keys, values and index keys together, in
        total over all layers with window pages, or over all layers without."""
        of_index = 0
        if self.index is not None and not window_pages:
            of_index = len(self.index.layers) * self.index.key_dim
        return of_index + sum(
            len(own) * kind.tensors_per_layer * kind.num_kv_heads * kind.head_dim
            for kind, own in self.kinds
            if kind.window_pages == window_pages
        )

    @property
    def kinds(self) -> tuple[tuple[AttentionShape, tuple[int, ...]], ...]:
        """Shapes whose layers are all alike, each with the indices of its layers."""
        found: dict[tuple[LayerHeads, bool, bool], list[int]] = {}
        same = LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim)
        for layer, heads in enumerate(self.by_layer or [same] * self.num_layers):
            has_window = self.windows[layer] is not None
            own = self.sections and has_window, self.window_pages and has_window
            found.setdefault((heads, *own), []).append(layer)
        return tuple(
            (
                replace(
                    self,
                    num_heads=heads.num_heads,
                    num_kv_heads=heads.num_kv_heads,
                    head_dim=heads.head_dim,
                    windows=tuple(self.windows[layer] for layer in layers),
                    sections=sections,
                    by_layer=(),
                    window_pages=own_pages,
                ),
                tuple(layers),
            )
            for (heads, sections, own_pages), layers in found.items()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetting:
    """The model, pages, batches and device that a backend is made for.

    ``dtype`` is that of queries and results. ``kv_dtype`` is that of pages: the same, or
    float8_e4m3. Batches of more than ``max_captured_batch_size`` rows are not captured in a graph.
    ``grouped``: steps may have groups. With ``batch_invariant`` a token's result depends only on
    its row. ``most_written``: see ``DecodeRows``.
    """

    shape: AttentionShape
    page_size: int
    max_sequence_length: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    max_batch_size: int
    max_captured_batch_size: int
    device: torch.device
    grouped: bool = False
    batch_invariant: bool = False
    most_written: int = 1

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence: the width of the page table."""
        return -(-self.max_sequence_length // self.page_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of the layers."""
        return tuple(dict.fromkeys(self.shape.windows))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunks:
    """Prompt chunks of a step, one after another in the flat batch; int32 on the device.

        flat batch   other tokens | chunk 0 | chunk 1 | other tokens
                                  offsets[0] offsets[1] offsets[2]
        chunk i      positions ends[i] - (offsets[i + 1] - offsets[i]) .. ends[i] of rows[i]

    ``rows`` [num_chunks] of ``page_table`` [num_rows, max_pages]; ``offsets`` [num_chunks + 1];
    ``ends`` [num_chunks]. The host knows the largest length and end, and has copies of offsets and
    ends, ``host_offsets`` and ``host_ends``. In a step to be captured, these copies are None, the
    two maxima are the largest possible, and chunks may be empty. ``window_table`` is the page table
    of layers with window pages; it has the dummy page in place of pages before the window.
    """

    rows: Tensor
    offsets: Tensor
    ends: Tensor
    page_table: Tensor
    max_length: int
    max_end: int
    host_offsets: IntArray | None = None
    host_ends: IntArray | None = None
    window_table: Tensor | None = None

    def over_window_pages(self) -> Chunks:
        """The same for layers with window pages."""
        assert self.window_table is not None
        return replace(self, page_table=self.window_table)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeRows:
    """Decoding rows of a step; int32 on the device. With guesses a row occurs several times, next
    to each other, at ascending positions: then the step writes up to ``most_written`` positions of
    it, and each occurrence reads those before its own.

    ``rows`` [batch_size] of ``page_table`` [num_rows, max_pages]; ``lengths`` [batch_size], each
    including the new token's position; ``host_lengths``, the same on the host, or None in a step to
    be captured. ``groups``, on the host, have indices of these rows as members; a backend may
    ignore them. ``grouped``: a step to be captured reads the groups that
    ``GroupedDecode.take_groups`` took last. ``pdl``: kernels may be launched before their
    predecessors end. ``window_table``: as in ``Chunks``.
    """

    rows: Tensor
    lengths: Tensor
    page_table: Tensor
    host_lengths: IntArray | None = None
    groups: Groups = NO_GROUPS
    grouped: bool = False
    pdl: bool = False
    window_table: Tensor | None = None

    def over_window_pages(self) -> DecodeRows:
        """The same for layers with window pages, which are not shared in groups."""
        assert self.window_table is not None
        return replace(self, page_table=self.window_table, groups=NO_GROUPS, grouped=False)


Attend: TypeAlias = "Callable[[Tensor, PagedKV, int], Tensor]"
"""Attention of all tokens of a planned step, decoding rows and chunks together. Called once per
layer: (q [num_tokens, num_heads, head_dim], pages of the layer, layer) -> [num_tokens, num_heads,
size of values], which is shaped like q unless pages hold latents. ``PagedAttention.plan`` makes it
from two ``LayerAttention``."""


class LayerAttention(Protocol):
    """Attention of the chunks or rows of a planned step, layer by layer."""

    def __call__(self, out: Tensor, q: Tensor, kv: PagedKV, layer: int) -> None:
        """Fill ``out``, [num_tokens, num_heads, head_dim] like ``q``, or with the size of latents
        in place of head_dim.

        For chunks, both have all tokens of the flat batch, but only those of chunks are filled. For
        decoding rows, both have only the rows' tokens. ``q`` may be strided along tokens.
        """


Expand: TypeAlias = "Callable[[Tensor], tuple[Tensor, Tensor]]"
"""Makes the keys and values of a layer's heads: (latents and rotated keys of some positions, as
pages hold them [num_positions, size]) -> [num_positions, num_heads, size of keys] and
[num_positions, num_heads, size of values]."""


class ExpandedChunks(Protocol):
    """Attention of the chunks of a planned step to keys and values that are made of latents."""

    def __call__(self, out: Tensor, q: Tensor, kv: PagedKV, expand: Expand) -> None:
        """Fill ``out`` [num_tokens, num_heads, size of values] for the tokens of chunks. ``q``
        [num_tokens, num_heads, size of keys] and ``out`` have all tokens of the flat batch."""


@dataclass(frozen=True, slots=True, eq=False)
class AttendExpanded:
    """``Attend`` of a step whose chunks read latents expanded, by ``chunks``.

    It is called with the tokens of the decoding rows alone, the first ``num_decodes``, if there
    are any: those of ``rows``.
    """

    rows: Attend | None
    num_decodes: int
    chunks: ExpandedChunks

    def __call__(self, q: Tensor, kv: PagedKV, layer: int) -> Tensor:
        assert self.rows is not None and len(q) == self.num_decodes
        return self.rows(q, kv, layer)


class ChunkExpansion(Protocol):
    """Attention of chunks to keys and values that are made of latents: of the chunks' own positions
    all at once, and of those before them up to ``most_positions`` at a time."""

    most_positions: int

    def plan_chunks(self, chunks: Chunks) -> ExpandedChunks | None:
        """Prepare what all layers of the step share; None if latents as they are take less work, or
        the step is to be captured."""


class PrefillAttention(Protocol):
    """Attention of prompt chunks."""

    def plan_chunks(self, chunks: Chunks) -> LayerAttention:
        """Prepare what all layers of the step share; called once per step."""


class DecodeAttention(Protocol):
    """Attention of one new token per row. Nothing here waits for a GPU or reads from it."""

    def plan_rows(self, rows: DecodeRows) -> LayerAttention:
        """Prepare what all layers of the step share; called once per step, inside the graph."""


@runtime_checkable
class ScheduledDecode(DecodeAttention, Protocol):
    """Decode attention whose kernels follow a schedule that the host makes from the lengths."""

    def schedule_rows(self, lengths: IntArray) -> None:
        """Write the schedule of the next captured step, which has ``len(lengths)`` rows.

        ``lengths`` int32 [batch_size] are on the host, 1 for padding. Called on the step's stream,
        before it is captured and before each replay.
        """


@runtime_checkable
class GroupedDecode(DecodeAttention, Protocol):
    """Decode attention whose captured steps can read the pages of groups once for all rows."""

    def take_groups(self, groups: Groups) -> bool:
        """Make captured steps with ``DecodeRows.grouped`` read these groups from now on.

        Returns False, and does nothing, if steps without groups would be faster. Members are
        indices of the step's rows. Called on the step's stream, before each replay; cheap while the
        groups stay the same.
        """


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """A backend; ``name`` is the value of the option that chooses it.

    ``can_capture``: decode steps can be captured in CUDA graphs. ``captures_chunks``: so can steps
    with prompt chunks. ``reads_groups``: it uses groups. ``expansion`` is for latents of chunks
    that end within ``longest_expanded`` positions, or of all if it is None. ``most_read_again`` is
    about the guesses of a step as decoding rows, each of which reads its row's pages again. If they
    read at most this number of positions, in total, that takes less time than chunks, which read
    pages once. If it is None, chunks always take longer.
    """

    name: str
    prefill: PrefillAttention
    decode: DecodeAttention
    can_capture: bool = True
    captures_chunks: bool = True
    reads_groups: bool = False
    expansion: ChunkExpansion | None = None
    longest_expanded: int | None = None
    most_read_again: int | None = None

    def plan(self, decodes: DecodeRows | None, chunks: Chunks | None) -> Attend:
        """Prepare a step: the decoding rows, whose tokens come first, then the chunks.

        In a step to be captured ``decodes`` may end with padding that extends over tokens of
        chunks; the chunks overwrite it.
        """
        if chunks is None:
            assert decodes is not None  # a step has tokens
            return _attend_rows(self.decode, decodes)
        num_decodes = 0 if decodes is None else len(decodes.rows)
        expanded = None if self.expansion is None else self.expansion.plan_chunks(chunks)
        if expanded is not None:
            alone = None if decodes is None else _attend_rows(self.decode, decodes)
            return AttendExpanded(alone, num_decodes, expanded)
        attend_chunks = self.prefill.plan_chunks(chunks)
        attend_rows = None if decodes is None else self.decode.plan_rows(decodes)
        outs: dict[tuple[int, int], Tensor] = {}  # by the number of heads and the size of values

        def attend(q: Tensor, kv: PagedKV, layer: int) -> Tensor:
            shape = q.shape[1], kv.values.shape[-1]
            out = outs.get(shape)
            if out is None:
                # Padding after the chunks is either computed as decodes of the dummy row, or stays
                # 0 in all layers. So what it stores in the dummy page is finite.
                out = outs[shape] = q.new_zeros(len(q), *shape)
            if attend_rows is not None:
                attend_rows(out[:num_decodes], q[:num_decodes], kv, layer)
            attend_chunks(out, q, kv, layer)
            return out

        return attend


def _attend_rows(decode: DecodeAttention, rows: DecodeRows) -> Attend:
    """``Attend`` of a step that has only decoding rows, or of these alone."""
    attend_rows = decode.plan_rows(rows)

    def attend(q: Tensor, kv: PagedKV, layer: int) -> Tensor:
        out = q.new_empty(*q.shape[:-1], kv.values.shape[-1])
        attend_rows(out, q, kv, layer)
        return out

    return attend
