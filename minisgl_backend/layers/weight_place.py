"""Where the tensors of a checkpoint belong, and which part of them a rank holds.

A checkpoint stores q_proj, k_proj and v_proj. A layer computes with one merged matrix, and a
tensor-parallel rank with a slice of it. A ``WeightPlace`` maps one to the other: it is a view into
a parameter, and says which part of the checkpoint's tensor goes there. Layers list their places by
the names of the checkpoint, so the loader needs to know neither merging nor ranks.

    checkpoint   q_proj [total, in_features]       k_proj            v_proj
                        start |--- size ---|             |--|              |--|
    parameter    qkv [q size + k size + v size, in_features]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

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


@dataclass(frozen=True, slots=True, eq=False)
class WeightPlace:
    """Where one tensor of the checkpoint goes, or this rank's slice of it.

    ``target`` is a view into a parameter. The checkpoint's tensor has ``shape``. If ``dim`` is
    given, only the indices from ``start`` up to ``start + target.shape[dim]`` along it go here.
    """

    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0


def whole(parameter: Tensor) -> WeightPlace:
    """The place of a parameter that every rank holds in full."""
    return WeightPlace(parameter.data, tuple(parameter.shape))


def collect_places(module: nn.Module, prefix: str = "") -> dict[str, WeightPlace]:
    """All places of a module and of the modules below it, by their full names in the checkpoint.

    A layer with parameters of its own has a method ``places``, which yields pairs of name and
    ``WeightPlace`` for itself and everything below it. The names are relative to the layer; one
    that begins with ``../`` is relative to its parent, as for the parts of merged matrices.
    """
    own = getattr(module, "places", None)
    if own is not None:
        parent = prefix.rpartition(".")[0]
        return {
            _full(parent, name[3:]) if name.startswith("../") else _full(prefix, name): place
            for name, place in own()
        }
    found: dict[str, WeightPlace] = {}
    for name, child in module.named_children():
        found |= collect_places(child, _full(prefix, name))
    return found


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
