"""The memory of a layer's experts: which of them a rank holds, what its matrices are, and where a
checkpoint's tensors go.

The matrices of all experts are one tensor each, or one ``StoredWeight`` if there are kernels for
their format. Must not know routers, or what is computed with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.kernels.experts import ExpertWeights
from minisgl_backend.kernels.gemv_cut import takes_experts
from minisgl_backend.layers.expert_places import InterleavedPlace, check_interleaved, stacked_place
from minisgl_backend.layers.feed_forward import GatedMLP
from minisgl_backend.layers.matrix import DenseMatrix, Matrix
from minisgl_backend.layers.quantized_matrix import Matrices, QuantizedMatrix
from minisgl_backend.layers.quantized_place import place_in
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import Place, Share, empty_parameter, even_share
from minisgl_backend.layers.weight_share import block_of
from minisgl_backend.parallel.group import Group
from minisgl_backend.weight_format import Layout, WeightFormat


class ExpertMemory(nn.Module):
    """The weights of the experts that this rank holds: a slice of each or, with ``whole_experts``,
    an equal number of experts.

    ``held`` are the experts, and ``inner`` and ``outer`` the shares of their inner and outer
    features. ``form`` is the format in which weights are kept; None if they are plain.
    """

    def __init__(
        self,
        name: str,
        outer_size: int,
        spec: ExpertsSpec,
        *,
        group: Group,
        matrices: Matrices,
        whole_experts: bool,
        shared: GatedMLP | None,
    ):
        """``name`` is that of all experts in the checkpoint; they read and write ``outer_size``
        numbers. There is room for ``shared``, an MLP that all tokens take, as the last expert, if
        it is like the others (``has_shared``). Raises ``ConfigError`` if the experts, or their
        features, cannot be split over the ranks."""
        super().__init__()
        self._name, self._interleaved = name, spec.interleaved
        num_experts, inner_size = spec.num_experts, spec.intermediate_size
        if whole_experts:
            self.held = even_share(num_experts, group, "the number of experts")
            self.inner = Share(inner_size, 0, inner_size)
        else:
            self.held = Share(num_experts, 0, num_experts)
            self.inner = even_share(inner_size, group, "moe_intermediate_size")
        self.outer = Share(outer_size, 0, outer_size)
        names = (
            ("up_proj", "down_proj") if spec.gate is None else ("gate_proj", "up_proj", "down_proj")
        )
        self._formats = {
            (expert, part): matrices.format_of(f"{name}.{expert}.{part}")
            for expert in range(self.held.start, self.held.end)
            for part in names
        }
        if spec.interleaved:
            check_interleaved(self._formats.values())
        of_down = [form for (_, part), form in self._formats.items() if part == "down_proj"]
        of_gate_up = [form for (_, part), form in self._formats.items() if part != "down_proj"]
        kept = matrices.experts_kept([*of_gate_up, *of_down])
        self.form = of_down[0] if kept else None
        self.has_shared = not whole_experts and self._is_alike(shared)
        more = 1 if self.has_shared else 0
        inner, outer = self.inner, self.outer
        parts = [(0, inner), (inner.size, inner)] if spec.gate is not None else [(0, inner)]
        width = len(parts) * inner.size
        self.gate_up = _memory_of(kept, of_gate_up, parts, outer, width, more=more)
        self.down = _memory_of(kept, of_down, [(0, outer)], inner, outer_size, more=more)
        self.gate_up_bias = empty_parameter(self.held.size, width) if spec.biases else None
        self.down_bias = empty_parameter(self.held.size, outer_size) if spec.biases else None
        self._gate = spec.gate

    def _is_alike(self, shared: GatedMLP | None) -> bool:
        """Whether this MLP's weights have the format and the size of an expert's, and kernels for a
        few tokens take them."""
        if shared is None or (self.form is not None and not takes_experts(self.form)):
            return False
        matrices = shared.gate_up_proj.matrix, shared.down_proj.matrix
        if matrices[1].in_features != self.inner.size:
            return False
        if self.form is None:
            return all(isinstance(matrix, DenseMatrix) for matrix in matrices)
        return all(
            isinstance(matrix, QuantizedMatrix) and matrix.form.stored_as == self.form.stored_as
            for matrix in matrices
        )

    def lay_out(self, shared: GatedMLP) -> None:
        """Make the MLP that all tokens take also the last expert in memory, where kernels for few
        tokens take it with the others. Only if it ``has_shared``, before weights are loaded. Codes
        are in memory twice, since each kernel has its own order of scales: see ``copy``."""
        assert self.has_shared
        for matrix, memory in self._pairs(shared):
            if isinstance(memory, nn.Parameter):
                assert isinstance(matrix, DenseMatrix)
                matrix.weight.data = memory.data[-1]

    def copy(self, shared: GatedMLP) -> None:
        """Copy that MLP, if it is in codes, to the last expert: once weights are loaded, and before
        they are packed."""
        assert self.has_shared
        for matrix, memory in self._pairs(shared):
            if isinstance(memory, StoredWeight):
                assert isinstance(matrix, QuantizedMatrix)
                memory.put_into(slice(0, matrix.out_features), -1)(matrix.storage.weight)

    def _pairs(self, shared: GatedMLP) -> Iterator[tuple[Matrix, nn.Parameter | StoredWeight]]:
        """The matrices of the MLP, each with that of all experts."""
        yield shared.gate_up_proj.matrix, self.gate_up
        yield shared.down_proj.matrix, self.down

    @property
    def weights(self) -> ExpertWeights:
        """What kernels compute with. Of the ranks that share an expert, only one has the biases of
        ``down``, so that they are in the sum once."""
        gate_up, down = (
            memory.weight if isinstance(memory, StoredWeight) else memory.data
            for memory in (self.gate_up, self.down)
        )
        is_first = self.inner.start == 0
        return ExpertWeights(
            gate_up,
            down,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias if is_first else None,
            gate=self._gate,
        )

    def elsewhere(self) -> Iterator[str]:
        """The experts that only other ranks hold, by their names in the checkpoint."""
        for expert in range(self.held.total):
            if not self.held.start <= expert < self.held.end:
                yield f"{self._name}.{expert}"

    def places(self) -> Iterator[tuple[str, Place]]:
        inner, outer, experts = self.inner, self.outer, self.held
        if self.gate_up_bias is not None and self.down_bias is not None:
            both_biases, down_bias = self.gate_up_bias.data, self.down_bias.data
            yield "gate_up_proj_bias", InterleavedPlace(both_biases, experts, inner, num_parts=2)
            yield "down_proj_bias", InterleavedPlace(down_bias, experts, outer, num_parts=1)
        gate_up, down = _memory(self.gate_up), _memory(self.down)
        first = self._formats[experts.start, "down_proj"]
        if first is not None and first.layout is Layout.MX_STACKED:
            yield "gate_up_proj", stacked_place(gate_up, first, experts, inner, outer, pairs=True)
            yield "down_proj", stacked_place(down, first, experts, outer, inner, pairs=False)
            return
        if self._interleaved:
            assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)  # plain, as checked
            yield "gate_up_proj", InterleavedPlace(gate_up, experts, inner, ins=outer, num_parts=2)
            yield "down_proj", InterleavedPlace(down, experts, outer, ins=inner, num_parts=1)
            return
        rows = {"gate_proj": slice(0, inner.size), "up_proj": slice(inner.size, 2 * inner.size)}
        if self._gate is None:
            rows = {"up_proj": slice(0, inner.size)}
        for (expert, part), form in self._formats.items():
            name, at = f"{expert}.{part}.weight", expert - experts.start
            if part == "down_proj":
                yield name, place_in(down, slice(0, outer.size), form, outer, inner, expert=at)
            else:
                yield name, place_in(gate_up, rows[part], form, inner, outer, expert=at)


def _memory_of(
    kept: bool,
    formats: list[WeightFormat | None],
    parts: list[tuple[int, Share]],
    ins: Share,
    out_features: int,
    *,
    more: int,
) -> nn.Parameter | StoredWeight:
    """Memory for one matrix of every expert, [num_experts, out_features, ins.size].

    ``formats`` are those of all experts, and ``parts`` pairs of a part's first row and its share.
    There is room for ``more`` additional experts.
    """
    shape, first = (len(formats) // len(parts) + more, out_features, ins.size), formats[0]
    if not kept or first is None:
        return empty_parameter(*shape)
    return StoredWeight(first, block_of(first, parts, ins), shape, num_inputs=ins.total)


def _memory(weight: nn.Parameter | StoredWeight) -> Tensor | StoredWeight:
    """What places write to."""
    return weight if isinstance(weight, StoredWeight) else weight.data
