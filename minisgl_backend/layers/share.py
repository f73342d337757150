"""Which part of a dimension a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.errors import ConfigError
from minisgl_backend.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Share:
    """The indices from ``start`` up to ``start + size``, of ``total`` in all."""

    total: int
    start: int
    size: int


def even_share(total: int, group: Group, what: str) -> Share:
    """This rank's part, if all ranks hold equal parts in the order of their ranks.

    Raises ``ConfigError``, which names ``what``, if ``total`` is not divisible.
    """
    if total % group.size:
        raise ConfigError(
            f"{what} ({total}) cannot be split evenly over {group.size} tensor-parallel ranks"
        )
    size = total // group.size
    return Share(total, group.rank * size, size)


def kv_head_share(num_kv_heads: int, head_dim: int, group: Group) -> Share:
    """The outputs of the key-value heads that this rank holds: those its query heads attend to.

    If there are more ranks than heads, neighbouring ranks hold the same head. The numbers must be
    ones that ``ModelSpec.attention_shape`` accepts.
    """
    first = group.rank * num_kv_heads // group.size
    num_heads = max(1, num_kv_heads // group.size)
    return Share(num_kv_heads * head_dim, first * head_dim, num_heads * head_dim)
