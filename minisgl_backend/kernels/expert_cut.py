"""How experts' grouped GEMMs (``cuda/experts.cu``, ``experts_many.cu``) are cut into tiles, and
which weights they can take.

Pure arithmetic, without a GPU. The cuts were the fastest that ``tools/gpu/sweep_experts`` found
with the weights of Qwen3-30B-A3B: for ``experts.cu`` on an H200, at 1 to 4,096 tokens; for
``experts_many.cu`` on an H100, at 600 to 8,192 tokens. The 4-bit cut for the fewest rows was found
on an H100 with the weights of gpt-oss-20b, and that of E2M1 for the most on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Final, TypeAlias

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.kernels.linear_cut import CODES_BLOCK, PLAIN, Numbers
from minisgl_backend.kernels.shared_memory import OF_HOPPER, most_bytes
from minisgl_backend.weight_format import Encoding, WeightFormat

_MAX_EXPERTS: Final = 1024
_MAX_CHOICES: Final = 32
"""The most experts from which ``cuda/routing.cu`` can choose, and the most that it can choose."""

_MAX_GROUPS: Final = 32
"""The most groups of experts of which it can leave out some."""

MOST_READ_AGAIN: Final = 40 * 2**20
"""The most bytes of a shared expert that rows after the first may read again; above that, separate
kernels are faster. Measured with GLM-4.5-Air in bfloat16 and FP8."""

_ALIGNED: Final = 16
"""A matrix has a multiple of this number of rows, and a row a multiple of this number of bytes."""

_LEAST_GROUP: Final = 32
"""A scale is shared by a multiple of this number of in_features, but in NVFP4."""


@dataclass(frozen=True, slots=True)
class ExpertCut:
    """A tile of ``features`` of a weight by ``tokens`` rows of x, and ``stages`` of the ring.

    ``per_processor`` thread blocks fit on a multiprocessor; ``resident`` of them are launched, and
    the next kernel begins to fill its rings in the room left by the others. ``by_warp``: each warp
    multiplies codes on its own, which takes more registers; for up to 16 ``tokens``. ``rounded``:
    rows of x are rounded to float8, as the weight is (``CodesKind.rounds_many_rows``).
    """

    features: int
    tokens: int
    stages: int
    per_processor: int = 1
    resident: int = 1
    by_warp: bool = False
    rounded: bool = False

    def shared_bytes(self, numbers: Numbers) -> int:
        """The ring, scales, and two barriers per stage."""
        stage = numbers.block * (
            self.features * numbers.bits // 8 + (1 if self.rounded else 2) * self.tokens
        )
        scales = self.features // 64 * 4 * numbers.scales
        return self.stages * (stage + scales + 16)

    def fitted(self, numbers: Numbers) -> ExpertCut:
        """The same with fewer stages if otherwise ``per_processor`` thread blocks do not fit."""
        room = most_bytes(OF_HOPPER, self.per_processor)
        of_stage = self.shared_bytes(numbers) // self.stages
        return replace(self, stages=min(self.stages, room // of_stage))


_Table: TypeAlias = dict[float | None, ExpertCut]

_OF_8_BITS: Final[_Table] = {
    4: ExpertCut(128, 8, 5, 2, 2),
    8: ExpertCut(128, 16, 5, 2, 2),
    16: ExpertCut(128, 24, 5, 2, 2),
    None: ExpertCut(128, 64, 6),
}
_OF_4_BITS: Final[_Table] = {
    0.5: ExpertCut(64, 8, 8, 2, 2, by_warp=True),
    4: ExpertCut(128, 8, 5, 2, 2, by_warp=True),
    8: ExpertCut(128, 16, 4, 2, 2),
    16: ExpertCut(128, 24, 3, 2, 2),
    None: ExpertCut(128, 64, 4),
}
_CUTS: Final[dict[Encoding | None, _Table]] = {
    None: {
        8: ExpertCut(128, 16, 6, 2, 2),
        16: ExpertCut(128, 24, 5, 2, 2),
        56: ExpertCut(128, 64, 4, 2, 2),
        None: ExpertCut(128, 128, 6),
    },
    Encoding.E4M3: _OF_8_BITS,
    Encoding.INT8: _OF_8_BITS,
    Encoding.INT4: _OF_4_BITS,
    # needs no registers for the sums of a group
    Encoding.E2M1: {
        **{rows: cut for rows, cut in _OF_4_BITS.items() if rows is not None},
        64: _OF_4_BITS[None],
        None: ExpertCut(128, 128, 2),
    },
}
"""By encoding, None being plain, each with the largest mean number of rows per expert that it is
for."""

_CUTS_IF_ROUNDED: Final = {**_OF_8_BITS, 16: ExpertCut(128, 24, 5, 2, 2, rounded=True)}
"""The same for weights in float8 whose rows of x may be rounded."""


@dataclass(frozen=True, slots=True)
class ManyCut:
    """A tile of ``cuda/experts_many.cu``, ``features`` of a weight by up to ``tokens`` rows of x,
    and ``stages`` of the ring. The thread blocks of a ``cluster`` have the same features but
    different rows.
    """

    features: int
    tokens: int
    stages: int
    cluster: int

    @property
    def block(self) -> int:
        """Rows of an expert that a cluster takes at once."""
        return self.cluster * self.tokens

    @property
    def shared_bytes(self) -> int:
        """The ring; for both warpgroups, 64 finished features, a pair and a factor of each row; for
        each stage, its scales, its tile and two barriers."""
        of_rows = 2 * self.tokens * (2 * 64 + 4 + 4)
        stage = (self.features + self.tokens) * 128 + 4 * 32 + 16 + 2 * 8
        return self.stages * stage + of_rows


MANY: Final = ManyCut(features=256, tokens=128, stages=4, cluster=2)

_MANY_ROWS: Final = {None: 96, Encoding.E4M3: 16}
"""By encoding, the mean number of rows per expert above which ``MANY`` is taken."""


def are_many(num_pairs: int, num_experts: int, encoding: Encoding | None) -> bool:
    """Whether ``MANY`` is for ``num_pairs`` rows that go to ``num_experts`` experts."""
    most = _MANY_ROWS.get(encoding)
    return most is not None and num_pairs > most * num_experts


def _table(encoding: Encoding | None, rounds: bool) -> _Table:
    return _CUTS_IF_ROUNDED if rounds else _CUTS[encoding]


def cuts(encoding: Encoding | None, *, rounds: bool = False) -> list[ExpertCut]:
    """All cuts that ``cut_of`` may return for weights in ``encoding``, None being plain."""
    return list(_table(encoding, rounds).values())


def cut_of(
    num_pairs: int, num_experts: int, encoding: Encoding | None, *, rounds: bool = False
) -> ExpertCut:
    """The cut for ``num_pairs`` rows that go to ``num_experts`` experts. ``rounds``: the rows may
    be rounded to float8."""
    return next(
        cut
        for rows, cut in _table(encoding, rounds).items()
        if rows is None or num_pairs <= rows * num_experts
    )


def knows(rule: RoutingRule) -> bool:
    """Whether the kernels can choose by this rule: not from too many experts or groups, not too
    many of them, and not by corrected logits."""
    if rule.corrects_logits:
        return False
    few = rule.num_experts <= _MAX_EXPERTS and rule.top_k <= _MAX_CHOICES
    return few and (not rule.limits_groups or rule.num_groups <= _MAX_GROUPS)


def fits(
    outer_size: int, inner_size: int, form: WeightFormat | None, *, gated: bool = True
) -> bool:
    """Whether there are kernels for weights of these sizes and this format. ``outer_size`` is that
    of what experts read and write, ``inner_size`` that of a rank's part; None stands for bfloat16.
    """
    group = None
    if form is not None:
        if form.reorders:
            return False
        if not form.has_row_scales:
            group = form.block[1]
    unit = _ALIGNED * 8 // (PLAIN.bits if form is None else form.encoding.bits)
    return all(
        height % _ALIGNED == 0
        and size % unit == 0
        and (group is None or gcd(group, size) % _LEAST_GROUP == 0)
        for height, size in _matrices(outer_size, inner_size, gated)
    )


def fits_many(outer_size: int, inner_size: int, *, gated: bool = True) -> bool:
    """Whether ``MANY`` can take weights of these sizes, which are those of ``fits``."""
    return all(
        # with a single block the kernel's registers spill
        height % MANY.features == 0 and size % CODES_BLOCK == 0 and size > CODES_BLOCK
        for height, size in _matrices(outer_size, inner_size, gated)
    )


def _matrices(outer_size: int, inner_size: int, gated: bool) -> tuple[tuple[int, int], ...]:
    """The rows and in_features of both matrices of an expert."""
    return ((2 if gated else 1) * inner_size, outer_size), (outer_size, inner_size)
