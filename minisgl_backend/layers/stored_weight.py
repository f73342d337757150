"""The memory of a weight that stays quantized, for kernels to compute with.

Knows the layout in memory (``kernels.quantized``). Must not know the layouts of checkpoints, or
GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minisgl_backend.kernels.quantized import QuantizedWeight
from minisgl_backend.layers.weight_place import empty_parameter
from minisgl_backend.weight_format import Encoding, WeightFormat


class StoredWeight(nn.Module):
    """A ``QuantizedWeight`` whose tensors are parameters, for one weight or a stack of them.

    ``shape`` is [out_features, in_features], perhaps with the number of experts before. Scales of
    integers in groups are of the activations' type. Those of whole rows stay in float32: they are
    few, and kernels take them so.
    """

    zeros: nn.Parameter | None
    groups: nn.Parameter | None
    row_scales: nn.Parameter | None

    def __init__(
        self,
        form: WeightFormat,
        block: tuple[int, int],
        shape: tuple[int, ...],
        *,
        num_inputs: int,
    ):
        """``num_inputs`` is that of the whole weight, over all ranks."""
        super().__init__()
        *stack, out_features, in_features = shape
        self.encoding, self.block = form.encoding, block
        is_integer = form.encoding in (Encoding.INT4, Encoding.INT8)
        self._casts_scales = is_integer and form.block[1] is not None
        columns = -(-(num_inputs if form.reorders else in_features) // block[1])
        lines = -(-out_features // block[0])
        float8 = form.encoding is Encoding.E4M3
        width = in_features * form.encoding.bits // 8
        codes_type = torch.float8_e4m3fn if float8 else torch.uint8
        scale_type = torch.uint8 if form.encoding is Encoding.E2M1 else torch.float32
        if form.has_row_scales:
            scale_type = torch.float8_e4m3fn
        self.codes = empty_parameter(*stack, out_features, width, dtype=codes_type)
        self.scales = empty_parameter(*stack, lines, columns, dtype=scale_type)
        self.zeros = self.groups = self.row_scales = None
        if not form.symmetric:
            self.zeros = empty_parameter(*stack, lines, columns, dtype=torch.uint8)
        if form.reorders:
            self.groups = empty_parameter(*stack, in_features, dtype=torch.int32)
        if form.has_row_scales:
            self.row_scales = empty_parameter(*stack, out_features, dtype=torch.float32)

    @property
    def weight(self) -> QuantizedWeight:
        """The whole weight, as kernels take it."""
        codes, scales = self.codes.data, self.scales.data
        zeros, groups, row_scales = (
            None if tensor is None else tensor.data
            for tensor in (self.zeros, self.groups, self.row_scales)
        )
        return QuantizedWeight(self.encoding, self.block, codes, scales, zeros, groups, row_scales)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def cast(self, dtype: torch.dtype) -> None:
        """Give scales the activations' type, if they have it."""
        if self._casts_scales:
            self.scales.data = self.scales.data.to(dtype)

    def put_into(self, rows: slice, index: int | None = None) -> Callable[[QuantizedWeight], None]:
        """A function that stores a weight in these rows, which begin at a block, of weight
        ``index`` of a stack."""
        whole = self.weight if index is None else self.weight.expert(index)
        lines = slice(rows.start // self.block[0], -(-rows.stop // self.block[0]))

        def put(part: QuantizedWeight) -> None:
            whole.codes[rows].copy_(part.codes)
            whole.scales[lines].copy_(part.scales)
            if whole.zeros is not None and part.zeros is not None:
                whole.zeros[lines].copy_(part.zeros)
            if whole.groups is not None and part.groups is not None:
                whole.groups.copy_(part.groups)
            if whole.row_scales is not None and part.row_scales is not None:
                whole.row_scales[rows].copy_(part.row_scales)

        return put
