"""Where the tensors of a checkpoint belong.

A checkpoint stores q_proj, k_proj and v_proj; a layer computes with one merged matrix, and a
tensor-parallel rank with a slice of it. A ``Slot`` joins the two: a view into a parameter, and
which part of the checkpoint's tensor goes there. Layers list their slots by the checkpoint's names,
so that the loader needs to know neither merging nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place for one tensor of the checkpoint, or for this rank's slice of it.

    ``target`` is a view into a parameter. The checkpoint's tensor has ``shape``; where ``dim`` is
    given, positions ``start`` .. ``start + target.shape[dim]`` along it belong here.
    """

    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0


class HasSlots(Protocol):
    """A layer with parameters of its own."""

    def slots(self) -> Iterator[tuple[str, Slot]]:
        """Names, relative to the layer, and places of the tensors that the checkpoint must have."""


def whole(parameter: Tensor) -> Slot:
    """The slot of a tensor that every rank holds in full."""
    return Slot(parameter.data, tuple(parameter.shape))


def collect_slots(module: nn.Module, prefix: str = "") -> dict[str, Slot]:
    """All slots of a module and those below it, by the checkpoint's full names.

    A module that has ``slots`` answers for everything below it. A name that is ``""`` stands for
    the module itself; names may begin with ``../`` to stand beside it (merged matrices do).
    """
    found: dict[str, Slot] = {}
    own = getattr(module, "slots", None)
    if own is not None:
        parent = prefix.rpartition(".")[0]
        for name, slot in own():
            if name.startswith("../"):
                full = f"{parent}.{name[3:]}" if parent else name[3:]
            else:
                full = f"{prefix}.{name}" if prefix else name
            found[full] = slot
        return found
    for name, child in module.named_children():
        found.update(collect_slots(child, f"{prefix}.{name}" if prefix else name))
    return found
