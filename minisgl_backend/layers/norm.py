"""Root mean square normalization (arXiv 1910.07467) of hidden states and of heads.

A norm is applied where its result is needed: in the GEMM that reads it, or with the residual add
before it. ``Normed`` says how much of it has been done. A norm also knows whether its reader
multiplies tokens in 8 bits, so that its kernel can round them. Must not know which layer reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minisgl_backend.gates import Gate
from minisgl_backend.kernels.activation import open_gates
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.float8_rows import (
    Float8Rows,
    float8_rows,
    gated_float8,
    rms_norm_float8,
)
from minisgl_backend.kernels.rms_norm import (
    fused_add_rms_norm,
    fused_rms_norm_add,
    rms_norm,
    scales_of_squares,
)
from minisgl_backend.layers.weight_place import Share, WeightPlace, empty_parameter, whole
from minisgl_backend.parallel.group import Group


class RMSNorm(nn.Module):
    """The weight of x / rms(x) * weight over hidden states; ``kernels.rms_norm`` computes it.

    The weight is (offset + the checkpoint's) * scale or, if not ``weighted``, ``scale``. If
    ``centered``, it is a LayerNorm's, perhaps with a ``bias``. Few kernels know these, so such a
    norm is never left to its reader.
    """

    rounding: Callable[[int], int | None] | None = None
    """For a number of tokens that its reader takes only in 8 bits: how many neighbours share a
    scale."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        scale: float = 1.0,
        offset: float = 0.0,
        centered: bool = False,
        biased: bool = False,
        weighted: bool = True,
    ):
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size) if biased else None
        self.eps = eps
        self.scale, self.offset, self.centered = scale, offset, centered
        self.weighted = weighted

    def reset(self) -> None:
        """Set what no checkpoint holds."""
        self.weight.fill_(self.scale)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        if not self.weighted:
            return
        yield "weight", whole(self.weight, scale=self.scale, offset=self.offset, neutral=1.0)
        if self.bias is not None:
            yield "bias", whole(self.bias, scale=self.scale, neutral=0.0)


class HeadNorm(nn.Module):
    """The weights of such a norm over each head: ``weight`` [num_heads + num_kv_heads, head_dim].

    All heads of queries have the same weight ``q`` [head_dim], and all heads of keys ``k``; each is
    ``offset`` + the checkpoint's. If not ``weighted``, the checkpoint has none, and all are 1.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        offset: float = 0.0,
        weighted: bool = True,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.has_keys = num_kv_heads > 0
        self.offset = offset
        self.weighted = weighted
        self.weight = empty_parameter(num_heads + num_kv_heads, head_dim)

    @property
    def q(self) -> Tensor:
        return self.weight[0]

    @property
    def k(self) -> Tensor:
        return self.weight[self.num_heads]

    def reset(self) -> None:
        """Set all weights to 1."""
        self.weight.fill_(1.0)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        if not self.weighted:
            return

        def place(heads: Tensor) -> WeightPlace:  # written to all heads
            return WeightPlace(heads, (heads.shape[1],), offset=self.offset, neutral=1.0)

        of_q, of_k = self.weight.data.tensor_split([self.num_heads])
        yield "../q_norm.weight", place(of_q)
        if self.has_keys:
            yield "../k_norm.weight", place(of_k)


class TokenNorm(nn.Module):
    """The weights of such a norm over all heads of a token's queries, and over all of its keys
    (OLMo 2): this rank's parts, ``q`` and ``k`` [num_heads * head_dim of the rank]."""

    def __init__(self, queries: Share, keys: Share, eps: float, group: Group):
        super().__init__()
        self.q = empty_parameter(queries.size)
        self.k = empty_parameter(keys.size)
        self.eps = eps
        self.group = group
        self._queries, self._keys = queries, keys

    def apply_to(self, qkv: Tensor) -> None:
        """Normalize queries and keys in place; ``qkv`` [num_tokens, queries, keys and values of the
        rank]."""
        q, k, _ = qkv.tensor_split([len(self.q), len(self.q) + len(self.k)], dim=1)
        if self.group.size == 1:
            rms_norm(q, self.q, self.eps, out=q)
            rms_norm(k, self.k, self.eps, out=k)
            return
        wide = at_least_float32(qkv).square()  # [num_tokens, width]
        of_q, of_k, _ = wide.tensor_split([len(self.q), len(self.q) + len(self.k)], dim=1)
        squares = torch.stack([of_q.mean(dim=1), of_k.mean(dim=1)], dim=1)  # [num_tokens, 2]
        # Ranks hold equal numbers of elements, and each key equally often: the mean of their means.
        mean = self.group.all_reduce(squares) / self.group.size
        scales = torch.rsqrt(mean + self.eps)
        q.copy_(q * scales[:, :1] * self.q)
        k.copy_(k * scales[:, 1:] * self.k)

    def places(self) -> Iterator[tuple[str, WeightPlace]]:
        for name, weight, share in (("q", self.q, self._queries), ("k", self.k, self._keys)):
            place = WeightPlace(weight.data, (share.total,), 0, share.start, neutral=1.0)
            yield f"../{name}_norm.weight", place


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """The input of a GEMM: ``x`` [num_tokens, in_features], and what is left to do with it.

    If ``norm`` is None, ``x`` is already normalized, or never is. With ``squares``, float32 [tiles,
    num_tokens], the norm's weight has been applied, but not its scale: summed over the tiles, they
    are the sum of squares of each token's hidden states. With a ``gate``, ``x`` is twice as wide:
    first the gates, of that function, then the values that they open. ``rounded``: the final input,
    if it is already there in 8 bits.
    """

    x: Tensor
    norm: RMSNorm | None = None
    squares: Tensor | None = None
    gate: Gate | None = None
    rounded: Float8Rows | None = None

    @property
    def eps(self) -> float:
        return 0.0 if self.norm is None else self.norm.eps

    def normalized(self, *, pdl: bool) -> Tensor:
        """What the GEMM multiplies, [num_tokens, in_features]. A norm that is half done is
        completed by PyTorch: kernels that take ``squares`` save that."""
        if self.gate is not None:
            return open_gates(self.x, self.gate, pdl=pdl)
        if self.squares is not None:
            scales = scales_of_squares(self.squares, self.x.shape[1], self.eps)
            return (self.x * scales[:, None]).to(self.x.dtype)
        if self.norm is None:
            return self.x
        norm = self.norm
        return rms_norm(
            self.x, norm.weight, norm.eps, centered=norm.centered, bias=norm.bias, pdl=pdl
        )

    def in_float8(self, group: int, *, pdl: bool) -> Float8Rows:
        """The same in 8 bits, if possible rounded by the kernel that completes it. ``group``
        neighbours share a scale."""
        if self.rounded is not None and self.rounded.group == group:
            return self.rounded
        if self.gate is not None:
            return gated_float8(self.x, group, self.gate, pdl=pdl)
        if self.norm is not None and self.squares is None:
            weight, eps = self.norm.weight, self.norm.eps
            return rms_norm_float8(self.x, None, weight, eps, group, pdl=pdl)
        return float8_rows(self.normalized(pdl=pdl), group, pdl=pdl)

    def unscaled(self, *, pdl: bool) -> tuple[Tensor, Tensor | None]:
        """For kernels that take ``squares``: the hidden states and these, or normalized hidden
        states and None."""
        return (self.normalized(pdl=pdl), None) if self.squares is None else (self.x, self.squares)


def add_sum(residual: Tensor, part: Tensor, norm: RMSNorm, group: Group, *, pdl: bool) -> Normed:
    """residual += the sum of every rank's ``part``, in place. Returns its norm. This is one kernel
    if ``is_sum_fused``. Otherwise, if the norm is read in 8 bits, it is written only so: other
    readers compute it from the residual stream.

    ``part``, ``residual`` [num_tokens, hidden_size]. May overwrite ``part``. ``pdl``: see
    ``FusedSum``.
    """
    weight, eps = norm.weight, norm.eps
    if group.fused is not None and is_sum_fused(group, norm, len(part), part.dtype):
        return Normed(group.fused.add_rms_norm(part, residual, weight, eps, pdl=pdl))
    part = group.all_reduce(part)
    neighbours = None if norm.rounding is None else norm.rounding(len(part))
    if neighbours is None:
        normed = fused_add_rms_norm(
            part, residual, weight, eps, centered=norm.centered, bias=norm.bias, pdl=pdl
        )
        return Normed(normed)
    rounded = rms_norm_float8(part, residual, weight, eps, neighbours, pdl=pdl)
    return Normed(residual, norm, rounded=rounded)


def add_normed(
    residual: Tensor,
    part: Tensor,
    after: RMSNorm,
    norm: RMSNorm | None,
    *,
    beside: tuple[Tensor, RMSNorm, RMSNorm] | None = None,
    factor: Tensor | None = None,
    others: Sequence[RMSNorm] = (),
    pdl: bool,
) -> tuple[Normed, list[Tensor]]:
    """residual = (residual + the norm ``after`` of ``part``) * ``factor``, in place, in one kernel.
    Returns the result under ``norm``, if any, and under each of ``others``, up to two.

    ``part``, already summed over the ranks, and ``residual`` [num_tokens, hidden_size]; ``factor``
    [1]. With ``beside``, which is another part and two norms, the sum of ``part`` under the first
    and the other under the second takes the place of ``part``. If ``norm`` is read in 8 bits, that
    is left to its reader.
    """
    is_rounded = norm is not None and norm.rounding is not None and norm.rounding(len(part))
    kept = [] if norm is None or is_rounded else [norm]
    norms = [*kept, *others]
    norms_eps = norms[0].eps if norms else after.eps
    assert all(of.eps == norms_eps for of in norms)
    assert beside is None or beside[1].eps == beside[2].eps == after.eps
    outs = fused_rms_norm_add(
        part,
        residual,
        after.weight,
        after.eps,
        norms=[of.weight for of in norms],
        norms_eps=norms_eps,
        beside=None if beside is None else (beside[0], beside[1].weight, beside[2].weight),
        factor=factor,
        pdl=pdl,
    )
    if kept:
        return Normed(outs[0]), outs[1:]
    return Normed(residual, norm), outs


def is_sum_fused(group: Group, norm: RMSNorm, num_tokens: int, dtype: torch.dtype) -> bool:
    """Whether ``add_sum`` of tensors in ``dtype`` before this norm is one kernel of the group."""
    if group.fused is None or norm.centered:
        return False
    return group.fused.fits(num_tokens, len(norm.weight), dtype)
