"""Where the tensors of a checkpoint belong.

A checkpoint stores q_proj, k_proj and v_proj. A layer computes with one merged matrix, and a
tensor-parallel rank with a slice of it. A ``Slot`` joins the two: it is a view into a parameter,
and says which part of the checkpoint's tensor goes there. Layers list their slots by the names of
the checkpoint, so the loader needs to know neither merging nor ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place for one tensor of the checkpoint, or for this rank's slice of it.

    ``target`` is a view into a parameter. The checkpoint's tensor has ``shape``. If ``dim`` is
    given, only the indices from ``start`` up to ``start + target.shape[dim]`` along it go here.
    """

    target: Tensor
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0


def whole(parameter: Tensor) -> Slot:
    """The slot of a parameter that every rank holds in full."""
    return Slot(parameter.data, tuple(parameter.shape))


def collect_slots(module: nn.Module, prefix: str = "") -> dict[str, Slot]:
    """All slots of a module and of the modules below it, by their full names in the checkpoint.

    A layer with parameters of its own has a method ``slots``, which yields pairs of name and
    ``Slot`` for itself and everything below it. The names are relative to the layer. A name that
    begins with ``../`` stands beside the layer, as the parts of merged matrices do.
    """
    own = getattr(module, "slots", None)
    if own is not None:
        parent = prefix.rpartition(".")[0]
        return {
            _full(parent, name[3:]) if name.startswith("../") else _full(prefix, name): slot
            for name, slot in own()
        }
    found: dict[str, Slot] = {}
    for name, child in module.named_children():
        found |= collect_slots(child, _full(prefix, name))
    return found


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
