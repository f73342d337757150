"""A rank's part of a quantized weight: which blocks it lies in, and their scales.

Its edges may lie inside a scale's block, or inside a word of packed codes. Then the whole block or
word is read, and scales are repeated for smaller blocks, so that no number changes. Must not know
how a checkpoint names or packs its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.quantized import QuantizedWeight, quantize
from minisgl_backend.layers.weight_place import Share
from minisgl_backend.weight_format import WeightFormat


def block_of(form: WeightFormat, parts: Sequence[tuple[int, Share]], ins: Share) -> tuple[int, int]:
    """The largest blocks of outputs and inputs that have one scale each, if the ``parts`` of a
    matrix, which are pairs of first row and share, lie in it one below the other."""
    rows, columns = form.block
    if rows is None:
        rows = 1
    for first, outs in parts:
        rows = math.gcd(rows, first, outs.start)
    if columns is None:
        return rows, ins.size
    return rows, columns if form.reorders else math.gcd(columns, ins.start)


def cells(share: Share, size: int) -> Share:
    """The cells of ``size`` indices in which a share lies; the first and the last may lie in it
    only in part."""
    first = share.start // size
    return Share(-(-share.total // size), first, -(-share.end // size) - first)


def held(share: Share) -> slice:
    return slice(share.start, share.end)


@dataclass(frozen=True, slots=True)
class WeightShare:
    """The outputs ``outs`` and inputs ``ins`` of a weight in a format, which get scales for blocks
    of size ``block`` (``block_of``)."""

    form: WeightFormat
    outs: Share
    ins: Share
    block: tuple[int, int]

    @property
    def lines(self) -> Share:
        """The lines of scales that are read."""
        rows = self.form.block[0]
        return Share(1, 0, 1) if rows is None else cells(self.outs, rows)

    @property
    def width(self) -> Share:
        """The columns of scales that are read."""
        columns = self.form.block[1]
        if columns is None:
            return Share(1, 0, 1)
        width = cells(self.ins, columns)
        return Share(width.total, 0, width.total) if self.form.reorders else width

    @property
    def enclosing(self) -> tuple[slice, slice]:
        """The rows and the columns of all blocks in which the share lies; those of the whole
        weight if a scale is for all of it."""
        if self.form.has_row_scales:
            return slice(0, self.outs.total), slice(0, self.ins.total)

        def numbers(share: Share, blocks: Share, size: int | None) -> slice:
            if size is None:
                return slice(0, share.total)
            return slice(blocks.start * size, min(blocks.end * size, share.total))

        rows, columns = self.form.block
        return numbers(self.outs, self.lines, rows), numbers(self.ins, self.width, columns)

    def check_bytes(self, name: str) -> None:
        """Raise ``ConfigError`` if the share would begin or end inside a byte of codes."""
        form, ins = self.form, self.ins
        if form.encoding.bits == 4 and (ins.start % 2 or ins.size % 2):
            raise ConfigError(
                f"{name}: {form} cannot be split at input {ins.start} or {ins.end} of {ins.total}, "
                "in the middle of a byte"
            )

    def finer(self, values: Tensor) -> Tensor:
        """Turn values [lines.size, width.size] of the blocks that are read into values of the
        share's own blocks."""
        rows, columns = self.form.block

        def index(share: Share, coarse: int | None, fine: int) -> Tensor:
            firsts = torch.arange(share.start, share.end, fine, device=values.device)
            return firsts * 0 if coarse is None else firsts // coarse - share.start // coarse

        values = values[index(self.outs, rows, self.block[0])]
        if columns is None or self.form.reorders:
            return values.contiguous()
        return values[:, index(self.ins, columns, self.block[1])]

    def of(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        groups: Tensor | None = None,
        row_scales: Tensor | None = None,
    ) -> QuantizedWeight:
        """The weight, made of the share's codes and ``row_scales``, and of the scales and zero
        points of the blocks that were read."""
        if zeros is not None:
            zeros = self.finer(zeros)
        return QuantizedWeight(
            self.form.encoding, self.block, codes, self.finer(scales), zeros, groups, row_scales
        )

    def quantized(self, weight: Tensor) -> QuantizedWeight:
        """Quantize the plain numbers of the ``enclosing`` blocks, and return the share of them. So
        the weight is the same for any number of ranks."""
        form, outs, ins = self.form, self.outs, self.ins
        rows, columns = form.block
        native = outs.total if rows is None else rows, ins.total if columns is None else columns
        found = quantize(weight, form.encoding, native, symmetric=form.symmetric)
        top, left = (edge.start for edge in self.enclosing)
        begin, per_byte = ins.start - left, 8 // form.encoding.bits
        of_rows = slice(outs.start - top, outs.end - top)
        line, column = self.lines.start - top // native[0], self.width.start - left // native[1]
        read = slice(line, line + self.lines.size), slice(column, column + self.width.size)
        groups = None
        if form.reorders:
            groups = torch.arange(ins.start, ins.end, device=weight.device).int() // native[1]
        return self.of(
            found.codes[of_rows, begin // per_byte : (begin + ins.size) // per_byte],
            found.scales[read],
            None if found.zeros is None else found.zeros[read],
            groups,
            None if found.row_scales is None else found.row_scales[of_rows],
        )
