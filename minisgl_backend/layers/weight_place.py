"""Where the tensors of a checkpoint belong, and which part of them a rank holds.

A checkpoint stores q_proj, k_proj and v_proj. A layer computes with one merged matrix, and a
tensor-parallel rank with a slice of it. A ``WeightPlace`` maps one to the other: it is a view into
a parameter, and says which part of the checkpoint's tensor goes there. Layers list their places by
the checkpoint's names, so the loader needs to know neither merging nor ranks. A quantized weight
consists of several tensors (``weight_layouts``); a ``Place`` may be of either kind. Must not know
files, or which layers a model has.

    checkpoint   q_proj [total, in_features]       k_proj            v_proj
                        start |--- size ---|             |--|              |--|
    parameter    qkv [q size + k size + v size, in_features]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Share:
    """The indices from ``start`` up to ``start + size``, out of ``total``."""

    total: int
    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


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
    """The outputs of the KV heads that this rank holds, which are those its query heads attend to.

    If there are more ranks than heads, neighbouring ranks hold the same head.
    ``ModelSpec.attention_shape`` must accept the numbers.
    """
    first = group.rank * num_kv_heads // group.size
    num_heads = max(1, num_kv_heads // group.size)
    return Share(num_kv_heads * head_dim, first * head_dim, num_heads * head_dim)


FLOATS: Final = ("F64", "F32", "F16", "BF16")
"""The types of plain weights, in the words of safetensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, and the part of it that a rank reads.

    ``names``: the last part of its name, which tools may spell in several ways. ``shapes`` and
    ``dtypes``: those that it may have, dtypes by safetensors' names. ``region``: what is read of a
    tensor with the same number of dimensions (``region_of``). ``is_scale``: its numbers must be
    finite and not 0, and above 0 unless ``signed``; if it ``may_be_zero``, they must be finite and
    have no sign. If ``optional``, checkpoints may lack it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...] = FLOATS
    region: tuple[slice, ...] = ()
    is_scale: bool = False
    signed: bool = True
    may_be_zero: bool = False
    optional: bool = False

    def region_of(self, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """What is read of a tensor of this shape. One with twice the dimensions has one of size 1
        after each; one with fewer lacks the last."""
        if len(shape) == 2 * len(self.region) and set(shape[1::2]) == {1}:
            return tuple(part for held in self.region for part in (held, slice(None)))
        return self.region[: len(shape)]


@dataclass(frozen=True, slots=True, eq=False)
class ReadTensor:
    """The region of a tensor that was read, and the tensor's full name."""

    name: str
    values: Tensor


class Place(Protocol):
    """Where one weight of the checkpoint goes, be it one tensor or several."""

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        """What to read for the weight of this name, by the role that it plays."""

    def fill(self, found: Mapping[str, ReadTensor]) -> None:
        """Store what was read, which is on the CPU. Raises a ``ConfigError`` that names a tensor
        with invalid values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight, over all ranks."""

    @property
    def device(self) -> torch.device: ...

    def draw(self, whole: Tensor) -> None:
        """Store this rank's part of a whole weight in plain numbers, of this ``shape``."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightPlace:
    """The place of a plain tensor, or of this rank's slice of it.

    ``target`` is a view into a parameter. The checkpoint's tensor has ``shape``. If ``dim`` is
    given, only the indices from ``start`` up to ``start + target.shape[dim]`` along it go here.
    What is stored is (offset + the checkpoint's number) * scale. ``neutral`` is the sum with which
    a norm or a scale has no effect.
    """

    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    scale: float = 1.0
    offset: float = 0.0
    neutral: float | None = None

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def region(self) -> tuple[slice, ...]:
        """Which part of the checkpoint's tensor belongs here."""
        if self.dim is None:
            return (slice(None),) * len(self.shape)
        held = slice(self.start, self.start + self.target.shape[self.dim])
        return (*[slice(None)] * self.dim, held)

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        own = name.rpartition(".")[2]
        return {"weight": StoredTensor(names=(own,), shapes=(self.shape,), region=self.region)}

    def fill(self, found: Mapping[str, ReadTensor]) -> None:
        self._store(found["weight"].values)

    def draw(self, whole: Tensor) -> None:
        self._store(whole[self.region])

    def _store(self, values: Tensor) -> None:
        if self.scale != 1.0 or self.offset:
            values = (values.double() + self.offset) * self.scale
        self.target.copy_(values)


def empty_parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter to be loaded, uninitialized, by default of PyTorch's default type."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def whole(
    parameter: Tensor, *, scale: float = 1.0, offset: float = 0.0, neutral: float | None = None
) -> WeightPlace:
    """The place of a parameter that every rank holds in full (``WeightPlace``)."""
    shape = tuple(parameter.shape)
    return WeightPlace(parameter.data, shape, scale=scale, offset=offset, neutral=neutral)


def collect_places(module: nn.Module, prefix: str = "") -> dict[str, Place]:
    """All places of a module and of the modules below it, by their full names in the checkpoint.

    A layer that has parameters itself has a method ``places``, which yields pairs of name and
    ``Place`` for itself and everything below it. Names are relative to the layer; a name that
    begins with ``../`` is relative to its parent, as for the parts of merged matrices.
    """
    own = getattr(module, "places", None)
    if own is not None:
        parent = prefix.rpartition(".")[0]
        return {
            _full(parent, name[3:]) if name.startswith("../") else _full(prefix, name): place
            for name, place in own()
        }
    found: dict[str, Place] = {}
    for name, child in module.named_children():
        found |= collect_places(child, _full(prefix, name))
    return found


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
