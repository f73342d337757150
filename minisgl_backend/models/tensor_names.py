"""How a checkpoint names its tensors, and which of the decoder's weights each tensor holds.

The decoder's modules have the names that Llama's checkpoints use. Some publishers use other names,
or merge several weights into one tensor. Only this module knows that: to all others, a tensor in a
file appears as the weights that it holds, under the decoder's names (``StoredAs``). Knows names,
types and shapes. Must not know files or layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from math import prod
from typing import Final

from minisgl_backend.errors import ConfigError

Region = tuple[int | slice, ...]
"""A part of a tensor: an index or a range for each of its first dimensions."""

_ROWS: Final = ("weight", "bias", "weight_scale", "weight_scale_inv", "weight_packed")
_OUTPUTS_AT: Final = {
    **dict.fromkeys((*_ROWS, "weight_zero_point"), 0),
    **dict.fromkeys(("qweight", "qzeros", "scales"), 1),
}
"""The dimension of a tensor that is its module's outputs, or blocks or words of outputs."""
_SCALABLE: Final = ("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "scales")
"""Tensors that a factor of the weight multiplies, unless they are codes."""
_DIVISOR: Final = "weight_global_scale"
"""A tensor that such a factor divides, as it itself divides the weight."""
_FOR_ALL_PARTS: Final = (
    *("input_scale", "input_zero_point", "g_idx", "weight_g_idx"),
    *("weight_scale_2", "weight_global_scale", "input_global_scale"),
)
_NEEDLESS: Final = ("weight_shape",)
"""Says about a merged module what its other tensors say as well."""
_OF_INPUTS: Final = "activation_scale"
_BLOCK: Final = 128
"""Rows and columns of the blocks in stacks of FP8."""
_BLOCKS: Final = (32, 64, 128, 256)
"""Rows that a line of scales may be for."""
_STACKED: Final = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<part>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?:_(?P<scale>scale_inv|scale|activation_scale))?"
)
BODY: Final = ("embed_tokens.", "layers.", "norm.")
"""How names begin in a checkpoint of only the layers, without ``model.`` before them."""
LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")
"""How names of the decoder's weights in a layer begin, with the layer's number."""
_OTHER_PARTS: Final = re.compile(
    r"(?:thinker\.)?(?:model\.)?(?:image_newline$|(?:vision_tower|vision_model|visual|connector|multi_modal_projector|mm_projector|audio_tower|embed_vision|embed_audio|vision_embedder|vision_adapter|vision_projection|vision_projector|projector|vit_large_projector|merger|visual_embeddings_table|layerwise_projectors|spatial_projectors)\.)"
)


@dataclass(frozen=True, slots=True)
class StoredAs:
    """Where a weight of the decoder is: in the whole tensor ``name`` of a file, or in its
    ``region``. ``shape`` is the weight's own. If ``transposed``, the weight is a matrix, and what
    is read has its dimensions the other way round.

    ``scale`` multiplies what is read: numbers in floating point or, of quantized weights, scales.
    With a ``period``, the weight is scattered: it consists of as many such regions as fit into its
    shape. Each begins ``period`` after the one before. They are joined along the last dimension
    that the region names.
    """

    name: str
    shape: tuple[int, ...]
    region: Region = ()
    transposed: bool = False
    period: int | None = None
    scale: float = 1.0

    @property
    def joined_at(self) -> int:
        """The dimension along which the regions of a scattered weight are joined."""
        return len(self.region) - 1

    def regions_within(self, region: Sequence[slice]) -> Iterator[Region]:
        """The regions of the file's tensor that are together this ``region`` of the weight."""
        if self.period is None:
            yield self.within(region)
            return
        at = self.joined_at
        first = self.region[at]
        assert isinstance(first, slice)  # a scattered weight is no expert of a stack
        size = first.stop - first.start
        wanted = [*region, *(slice(None) for _ in self.shape[len(region) :])]
        begin, end, _ = wanted[at].indices(self.shape[at])
        for index in range(begin // size, -(-end // size)):
            at_once = slice(max(begin - index * size, 0), min(end - index * size, size))
            shift = first.start + index * self.period
            held = slice(shift + at_once.start, shift + at_once.stop)
            yield (*wanted[:at], held, *wanted[at + 1 :])

    def within(self, region: Sequence[slice]) -> Region:
        """The region of the file's tensor that is this ``region`` of the weight."""
        rest = list(region)
        if self.transposed:
            rest += [slice(None)] * (len(self.shape) - len(rest))
            rest.reverse()
        found: list[int | slice] = []
        for held in self.region:
            if isinstance(held, int):
                found.append(held)
                continue
            own = rest.pop(0) if rest else slice(None)
            begin, end, _ = own.indices(held.stop - held.start)
            found.append(slice(held.start + begin, held.start + end))
        return (*found, *rest)


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names in a checkpoint.

    ``renamed`` are pairs of a fragment of a name there and what replaces it in the decoder's name,
    once in a name; all pairs apply, in their order. ``merged`` lists the modules whose tensors
    hold several projections, the outputs of one after those of another: by the end of the module's
    name, the names of the projections and their numbers of outputs. Those that are also in
    ``by_head``, each with its number of heads, hold the outputs of all projections for the first
    head, then those for the next. A checkpoint of only the layers, as of embedding models, leaves
    out the first part of all names, ``model.``. If the checkpoint is ``multimodal``, the tensors
    for images and audio are left out. Tensors whose names for the decoder begin with one of
    ``left_out``, or end with one of ``buffers``, are always left out. Those whose names for the
    decoder end with one of ``vectors`` are vectors, whatever dimensions of 1 they may have besides.
    The weights of modules whose names end with one of ``transposed`` have inputs before outputs.
    With ``keeps_stacks`` a tensor of all experts is one weight, not several of one expert each.
    With ``transposed_stacks`` inputs come before outputs in such tensors, which are plain. With
    ``order_by_hidden_size`` files may have either order: it is the usual one unless the tensor, or
    the scales of its blocks, would then be of another hidden size. ``scaled``: the factors of some
    weights without biases, by the ends of the decoder's names of their modules.
    """

    renamed: tuple[tuple[str, str], ...] = ()
    merged: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    by_head: Mapping[str, int] = field(default_factory=dict)
    multimodal: bool = False
    left_out: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    keeps_stacks: bool = False
    transposed_stacks: bool = False
    order_by_hidden_size: int | None = None
    scaled: Mapping[str, float] = field(default_factory=dict)

    def weights(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredAs]]:
        """The decoder's weights that the tensor ``name`` in a file holds; none if it is left out.

        Raises ``ConfigError`` if a merged tensor cannot be taken apart.
        """
        for weight, stored in self._weights(name, shape):
            module, _, kind = weight.rpartition(".")
            factors = (factor for end, factor in self.scaled.items() if module.endswith(end))
            factor = next(factors, 1.0)
            if kind == _DIVISOR:
                factor = 1 / factor
            is_scaled = factor != 1.0 and kind in (*_SCALABLE, _DIVISOR)
            yield weight, replace(stored, scale=factor) if is_scaled else stored

    def _weights(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, StoredAs]]:
        """The same without factors."""
        if self.multimodal and _OTHER_PARTS.match(name):
            return
        own = name
        for theirs, ours in self.renamed:
            if theirs in own:
                own = own.replace(theirs, ours, 1)
        if own.startswith(BODY):
            own = f"model.{own}"
        if own.startswith(self.left_out) or own.endswith(self.buffers):
            return
        stacked = None if self.keeps_stacks else _STACKED.fullmatch(own)
        if stacked is not None and len(shape) == (1 if stacked["scale"] == _OF_INPUTS else 3):
            if not self._is_transposed(stacked, shape):
                yield from _of_experts(stacked, name, shape)
                return
            if stacked["scale"] is None or self.order_by_hidden_size is not None:
                yield from _of_transposed_experts(stacked, name, shape)
                return
        if own.endswith(self.vectors) and len(shape) > 1 and prod(shape) == max(shape):
            size = max(shape)
            region: list[int | slice] = [0] * len(shape)
            region[shape.index(size)] = slice(0, size)
            yield own, StoredAs(name, (size,), tuple(region))
            return
        module, _, kind = own.rpartition(".")
        around, _, last = module.rpartition(".")
        end = next((end for end in self.merged if module.endswith(end)), None)
        is_transposed = (
            module.endswith(self.transposed) and kind == "weight" and len(shape) == 2  # not biases
        )
        if end is None:
            own_shape = shape[::-1] if is_transposed else shape
            yield own, StoredAs(name, own_shape, transposed=is_transposed)
            return
        parts = self.merged[end]
        modules = {f"{around}.{part}.{kind}": size for part, size in parts.items()}
        if kind in _NEEDLESS:
            return
        if kind in _FOR_ALL_PARTS or (kind in _ROWS and shape in ((), (1,))):
            yield from ((part, StoredAs(name, shape)) for part in modules)
            return
        at = 1 if is_transposed else _OUTPUTS_AT.get(kind)
        if at is None or len(shape) <= at:
            raise ConfigError(f"{name}: {last} merges {', '.join(parts)}, and no {kind} is known")
        for part, stored in _of_outputs(modules, name, shape, at, self.by_head.get(end, 1)):
            if is_transposed:
                stored = replace(stored, shape=stored.shape[::-1], transposed=True)
            yield part, stored

    def _is_transposed(self, stacked: re.Match[str], shape: tuple[int, ...]) -> bool:
        """Whether inputs come before outputs in a tensor of all experts, or in its scales."""
        scale, hidden_size = stacked["scale"], self.order_by_hidden_size
        if hidden_size is None or scale not in (None, "scale_inv"):
            return self.transposed_stacks
        size = hidden_size if scale is None else -(-hidden_size // _BLOCK)
        return shape[1 if stacked["part"] == "down_proj" else 2] != size

    def in_checkpoint(self, name: str, prefix: str | None) -> str:
        """The name in the checkpoint for a weight ``name`` of the decoder, for errors. ``prefix``
        is what other names there have in place of ``model.``; None if that is not known."""
        module, _, kind = name.rpartition(".")
        name = f"{self.merged_module(module)}.{kind}"
        if prefix is None:
            prefix = next((theirs for theirs, ours in self.renamed if ours == "model."), "model.")
        outer = f"{prefix.partition('.')[0]}."
        restored = {"model."}  # at the end
        own = name  # what one pair restores may look like what another replaces
        for theirs, ours in self.renamed:
            if ours in restored:
                continue
            if theirs.startswith("."):
                is_there = ours in own
            elif ours.startswith("model."):
                is_there = own.startswith(ours) and theirs.startswith(("model.", "mtp.", prefix))
            else:  # what stands before the head depends on what stands before the layers
                is_there = own.startswith(ours) and theirs.startswith(outer)
            if is_there:
                name = name.replace(ours, theirs, 1)
                restored.add(ours)
        is_layer = own.startswith("model.") and name.startswith("model.")
        if not is_layer or (prefix and name.startswith(prefix)):
            return name
        return prefix + name.removeprefix("model.")

    def merged_module(self, module: str) -> str:
        """The module whose tensors hold those of the decoder's ``module``, mostly itself."""
        around, _, part = module.rpartition(".")
        for end, parts in self.merged.items():
            merged = f"{around}.{end.rpartition('.')[2]}"
            if part in parts and merged.endswith(end):
                return merged
        return module


MULTIMODAL: Final = TensorNames(
    renamed=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    multimodal=True,
)
"""A language model inside a larger one, as publishers ship it and as transformers writes it."""


def _of_experts(
    stacked: re.Match[str], name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, StoredAs]]:
    """The weights in a tensor of one matrix of all experts, [num_experts, out_features,
    in_features], or of its scales, [num_experts, lines, columns]. Gates come before ups. Scales of
    inputs have only the first dimension.

    Raises ``ConfigError`` if gates and ups cannot be halves.
    """
    num_experts, *size = shape
    scale = stacked["scale"]
    kind = (
        "weight" if scale is None else "input_scale" if scale == _OF_INPUTS else f"weight_{scale}"
    )
    parts = _parts_of(stacked)
    if size and size[0] % len(parts):
        raise ConfigError(
            f"{name} has the shape {shape}, whose {size[0]} rows are no gates and as many ups"
        )
    for expert, (index, part) in product(range(num_experts), enumerate(parts)):
        weight = f"{stacked['experts']}.{expert}.{part}.{kind}"
        if not size or len(parts) == 1:
            yield weight, StoredAs(name, tuple(size), (expert,))
            continue
        half = size[0] // 2
        region = expert, slice(index * half, (index + 1) * half)
        yield weight, StoredAs(name, (half, *size[1:]), region)


def _of_transposed_experts(
    stacked: re.Match[str], name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, StoredAs]]:
    """The same for weights [num_experts, in_features, out_features], with gates before ups, and for
    the scales of their blocks. Raises ``ConfigError`` if gates and ups cannot be halves."""
    num_experts, ins, outs = shape
    parts = _parts_of(stacked)
    if outs % len(parts):
        raise ConfigError(
            f"{name} has the shape {shape}, whose {outs} columns are no gates and as many ups"
        )
    size = outs // len(parts)
    kind = "weight" if stacked["scale"] is None else f"weight_{stacked['scale']}"
    for expert, (index, part) in product(range(num_experts), enumerate(parts)):
        weight = f"{stacked['experts']}.{expert}.{part}.{kind}"
        region = expert, slice(0, ins), slice(index * size, (index + 1) * size)
        yield weight, StoredAs(name, (size, ins), region, transposed=True)


def _parts_of(stacked: re.Match[str]) -> tuple[str, ...]:
    """The projections of each expert that a tensor of all experts holds."""
    part = stacked["part"]
    return ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)


def _of_outputs(
    sizes: Mapping[str, int], name: str, shape: tuple[int, ...], at: int, num_heads: int
) -> Iterator[tuple[str, StoredAs]]:
    """The weights in a merged tensor: the outputs of each part, or blocks or words of them, which
    are dimension ``at``. They may be ordered by heads; then a single line of scales, which is that
    of all heads, is each part's."""
    begin, count = 0, shape[at]
    before = tuple(slice(0, size) for size in shape[:at])
    if num_heads > 1 and count == 1:
        yield from ((part, StoredAs(name, shape)) for part in sizes)
        return
    period = count // num_heads if num_heads > 1 else None
    owns = _lines_of_parts(list(sizes.values()), count, num_heads)
    if owns is None:
        what = "columns" if at else "rows"
        raise ConfigError(
            f"{name} has the shape {shape}, whose {what} cannot be parts of "
            + ", ".join(map(str, sizes.values()))
        )
    for part, own in zip(sizes, owns, strict=True):
        region = *before, slice(begin, begin + own)
        of_part = *shape[:at], own * num_heads, *shape[at + 1 :]
        yield part, StoredAs(name, of_part, region, period=period)
        begin += own


def _lines_of_parts(sizes: Sequence[int], count: int, num_heads: int) -> list[int] | None:
    """How many of ``count`` lines of a merged tensor are a part's, or a head's of it, by the parts'
    ``sizes``: in proportion or, if lines are blocks and the last one is not full, as many as the
    part has blocks. None if a part begins within a line."""
    total = sum(sizes)
    if count > total:
        return None
    if all(size * count % (total * num_heads) == 0 for size in sizes):
        return [size * count // (total * num_heads) for size in sizes]
    begins = list(accumulate(sizes, initial=0))
    for block in _BLOCKS if num_heads == 1 else ():
        if -(-total // block) == count and all(begin % block == 0 for begin in begins[:-1]):
            return [-(-size // block) for size in sizes]
    return None
