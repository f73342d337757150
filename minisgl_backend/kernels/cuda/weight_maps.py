"""How the TMA loads weights: the rows and columns of a box, of one weight or of all experts'."""

from __future__ import annotations

from torch import Tensor

from minisgl_backend.kernels.cuda.module import TensorMap, tensor_map


class WeightMaps:
    """The tensor maps of weights [.., height, in_features], whose first dimension, if there are
    three, are the experts.

    If ``gated``, 8 rows of the gate alternate with the 8 rows that they open. Maps are kept, since
    weights do not move while the model lives.
    """

    def __init__(self, *, gated: bool) -> None:
        self._gated = gated
        self._maps: dict[tuple[int, int, int], TensorMap] = {}

    def __call__(self, weight: Tensor, columns: int, rows: int) -> TensorMap:
        """The map of boxes of ``rows`` x ``columns``, in elements of ``weight``."""
        key = weight.data_ptr(), columns, rows
        if key not in self._maps:
            self._maps[key] = self._made(weight, columns, rows)
        return self._maps[key]

    def _made(self, weight: Tensor, columns: int, rows: int) -> TensorMap:
        assert weight.is_contiguous()
        *experts, height, size = weight.shape
        shape, strides, box = [size, height], [size], [columns, rows]
        if self._gated:
            half = height // 2
            shape, strides = [size, 8, 2, half // 8], [size, half * size, 8 * size]
            box = [columns, 8, 2, rows // 16]
        if experts:
            shape, strides, box = [*shape, *experts], [*strides, height * size], [*box, 1]
        return tensor_map(weight, shape, strides, box)
