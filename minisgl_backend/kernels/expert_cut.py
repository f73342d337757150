"""How the grouped GEMMs of ``cuda/experts.cu`` are cut into tiles, and which weights they can take.

Pure arithmetic, without a GPU. The cuts were the fastest of those that ``tools/gpu/sweep_experts``
tries on an H200, with the weights of Qwen3-30B-A3B, at 1 to 4,096 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.weight_format import Encoding, WeightFormat

_MAX_EXPERTS: Final = 1024
_MAX_CHOICES: Final = 32
"""What ``cuda/routing.cu`` can choose from, and choose."""

MOST_ROWS: Final = 4
"""Tokens up to which each row of x is multiplied for itself, without tensor cores."""

_ROW_BYTES: Final = 128


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """A tile of ``features`` of a weight by ``tokens`` rows of x, and ``stages`` of the ring.

    ``per_processor`` thread blocks share a multiprocessor; ``resident`` of them are launched, and
    the next kernel begins to fill its rings in the room of the others.
    """

    features: int
    tokens: int
    stages: int
    per_processor: int = 1
    resident: int = 1

    def shared_bytes(self, bits: int) -> int:
        """The ring, scales, two barriers a stage, and 8 finished rows of each warp."""
        rows = self.features + self.tokens * (16 // bits)
        scales = 0 if bits == 16 else 4 * self.features
        return self.stages * (_ROW_BYTES * rows + scales + 16) + 8 * 48 * (self.features // 16)


_CUTS: Final = {
    16: {
        8: ExpertCut(128, 16, 6, 2, 2),
        16: ExpertCut(128, 32, 5, 2, 2),
        64: ExpertCut(128, 64, 4, 2, 2),
        None: ExpertCut(128, 128, 6),
    },
    8: {
        4: ExpertCut(128, 8, 5, 2, 2),
        8: ExpertCut(128, 16, 5, 2, 2),
        16: ExpertCut(128, 32, 4, 2, 2),
        None: ExpertCut(128, 64, 6),
    },
}
"""By bits of a weight, and the largest mean number of rows of an expert that each is for."""


def cuts(bits: int) -> list[ExpertCut]:
    """All that ``cut_of`` returns for weights of ``bits``."""
    return list(_CUTS[bits].values())


def cut_of(num_pairs: int, num_experts: int, bits: int) -> ExpertCut:
    """The cut for ``num_pairs`` rows that go to ``num_experts`` experts."""
    return next(
        cut for rows, cut in _CUTS[bits].items() if rows is None or num_pairs <= rows * num_experts
    )


def knows(spec: ExpertsSpec) -> bool:
    """Whether the kernels know all that such experts compute: not biases, gates other than SiLU,
    routers that limit groups, or that choose from, or choose, too many."""
    rule = spec.routing
    few = rule.num_experts <= _MAX_EXPERTS and rule.top_k <= _MAX_CHOICES
    return few and not rule.limits_groups and spec.gate is None and not spec.biases


def fits(hidden_size: int, inner_size: int, bits: int) -> bool:
    """Whether there are kernels for weights of these sizes, the second that of a rank's part."""
    step = _ROW_BYTES * 8 // bits  # in_features of a stage of the ring
    tile = max(cut.features for cut in cuts(bits))
    return all(
        height % tile == 0 and size % step == 0
        for height, size in ((2 * inner_size, hidden_size), (hidden_size, inner_size))
    )


def bits_of(form: WeightFormat) -> int | None:
    """Of a weight in a format that the kernels can take; None if they cannot."""
    inputs = form.block[1]
    if form.encoding is not Encoding.E4M3 or (inputs is not None and inputs % _ROW_BYTES):
        return None
    return form.encoding.bits
