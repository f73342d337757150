"""The router of a mixture of experts: its logits.

Experts are picked by them (``kernels.routing.choose``). Must not know which experts a rank holds,
or what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.kernels import linear_cut
from minisgl_backend.kernels.dispatch import at_least_float32
from minisgl_backend.kernels.routing import Choices, choose
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.quantized_place import place_in
from minisgl_backend.layers.weight_place import Place, Share, empty_parameter, whole

if TYPE_CHECKING:  # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.invariant_linear import InvariantKernels, InvariantLinear
    from minisgl_backend.kernels.cuda.linear import LinearKernel, TensorCores


class Router(nn.Module):
    """Picks the experts of a token (Switch Transformer, arXiv 2101.03961; Mixtral, arXiv
    2401.04088). Every rank holds all of it.

    If the rule is ``wide``, logits are computed in float32, and so is what the checkpoint has
    beside the weight.
    """

    correction: nn.Parameter | None
    factors: nn.Parameter | None

    def __init__(self, name: str, hidden_size: int, spec: ExpertsSpec, matrices: Matrices):
        """``name`` is the router's in the checkpoint."""
        super().__init__()
        self.rule = spec.routing
        num_experts = spec.num_experts
        self._format = matrices.format_of(name)
        self.weight = empty_parameter(num_experts, hidden_size)
        self.bias = empty_parameter(num_experts) if spec.biases else None
        self.correction = empty_parameter(num_experts) if spec.routing.corrected else None
        self.factors = empty_parameter(num_experts) if spec.routing.scaled else None
        self._kernel: LinearKernel | None = None
        self._invariant: InvariantLinear | None = None

    def use_invariant_kernels(self, kernels: InvariantKernels) -> None:
        """Compute logits by ``kernels``; they have no bias."""
        self._invariant = kernels.linear(tuple(self.weight.shape))

    def cast(self, dtype: torch.dtype) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.to(wide if self.rule.wide else dtype)
        if self.correction is not None:
            self.correction.data = self.correction.data.to(wide)

    def narrow(self, dtype: torch.dtype) -> None:
        """Keep a loaded weight in ``dtype`` if that changes no element, as in most checkpoints: the
        logits stay the same, and half as much is read."""
        narrowed = self.weight.data.to(dtype)
        if torch.equal(narrowed.to(self.weight.dtype), self.weight.data):
            self.weight.data = narrowed

    @property
    def is_wide(self) -> bool:
        """Whether logits are in float32, though hidden states may have 16 bits."""
        return self.rule.wide or self.weight.dtype == torch.float32

    @property
    def fits_tensor_cores(self) -> bool:
        """Whether such kernels can compute its logits, even if the input's norm is half done."""
        num_experts, hidden_size = self.weight.shape
        reason = linear_cut.why_not(num_experts, hidden_size, whole=False)
        return self.weight.dtype == torch.bfloat16 and not self.is_wide and reason is None

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit by ``kernels``. Only if it ``fits_tensor_cores``."""
        self._kernel = kernels.linear(self.weight.shape, gate=None, codes=None)

    def logits(self, x: Tensor, *, biased: bool = True, pdl: bool = False) -> Tensor:
        """[num_tokens, num_experts], for ``x`` [num_tokens, hidden_size]; without the bias unless
        ``biased``."""
        bias = self.bias if biased else None
        if self._invariant is not None:
            return self._invariant(x, self.weight)
        kernel = self._kernel
        if kernel is not None and len(x) <= kernel.most_tokens:
            return kernel(x, self.weight, squares=None, eps=0.0, bias=bias, pdl=pdl)
        if self.rule.wide:
            assert bias is None
            return _in_float32(x, self.weight)
        return F.linear(x, self.weight, bias)

    def forward(self, x: Tensor) -> Choices:
        """Choices among all experts, for ``x`` [num_tokens, hidden_size]."""
        return choose(self.logits(x), self.rule, self.correction, self.factors)

    def places(self) -> Iterator[tuple[str, Place]]:
        num_experts, hidden_size = self.weight.shape
        outs, ins = Share(num_experts, 0, num_experts), Share(hidden_size, 0, hidden_size)
        yield "weight", place_in(self.weight.data, slice(None), self._format, outs, ins)
        if self.bias is not None:
            yield "bias", whole(self.bias)
        if self.correction is not None:
            yield "e_score_correction_bias", whole(self.correction)
        if self.factors is not None:
            yield "../per_expert_scale", whole(self.factors, neutral=1.0)


def _in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, with nothing rounded to 16 bits."""
    if x.is_cuda and x.dtype == weight.dtype and x.itemsize == 2:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(at_least_float32(x), at_least_float32(weight))
