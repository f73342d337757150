"""A mixture of experts (``FeedForward``): MLPs, of which a router picks a few for each token.

``router`` knows how experts are chosen, ``expert_memory`` which ones a rank holds, and
``kernels.experts`` what is computed with them. Must not know rows, pages, or which layer it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minisgl_backend.experts_spec import ExpertsSpec
from minisgl_backend.gates import LimitedGate
from minisgl_backend.kernels import expert_cut
from minisgl_backend.kernels.adapters import AdaptedTokens
from minisgl_backend.kernels.experts import (
    ExpertWeights,
    SharedOutput,
    add_outputs,
    expert_outputs,
    fused_experts,
    fused_experts_reference,
    has_kernel,
    sum_outputs,
)
from minisgl_backend.kernels.routing import NO_EXTRAS, Choices, RouterExtras
from minisgl_backend.layers.expert_memory import ExpertMemory
from minisgl_backend.layers.feed_forward import GatedMLP, LimitedMLP, UngatedMLP
from minisgl_backend.layers.linear import MergedColumnLinear
from minisgl_backend.layers.norm import Normed, RMSNorm, add_sum
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.quantized_place import place_in
from minisgl_backend.layers.router import Router
from minisgl_backend.layers.weight_place import (
    Place,
    Share,
    collect_places,
    empty_parameter,
)
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:  # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.expert_layers import ExpertsKernels, HopperExperts
    from minisgl_backend.kernels.cuda.invariant_linear import InvariantKernels
    from minisgl_backend.kernels.cuda.linear import TensorCores


class ExpertsMLP(nn.Module):
    """MLPs behind a router (``FeedForward``), and perhaps one that all tokens take.

    Unless ``fused``, the kernel's twin computes one expert after another, which waits for the
    device. ``memory`` has the experts' weights.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        spec: ExpertsSpec,
        *,
        fused: bool,
        group: Group,
        matrices: Matrices,
        whole_experts: bool = False,
    ):
        """``name`` is the module's in the checkpoint. Raises ``ConfigError`` if the experts, or
        their features, cannot be split over the ranks."""
        super().__init__()
        self.group, self.fused, self.spec = group, fused, spec
        self._is_invariant = False
        self.router = Router(f"{name}.{spec.router}", hidden_size, spec, matrices)
        self.shared: GatedMLP | LimitedMLP | UngatedMLP | None = None
        self.shared_gate: nn.Parameter | None = None
        if (shared := spec.shared) is not None:
            make: partial[GatedMLP] | partial[LimitedMLP] | partial[UngatedMLP]
            make, gate = partial(UngatedMLP, activation="relu2"), spec.gate_of_shared
            if isinstance(gate, LimitedGate):
                make = partial(LimitedMLP, gate=gate)
            elif gate is not None:
                make = partial(GatedMLP, gate=gate)
            self.shared = make(
                f"{name}.{shared.name}",
                hidden_size,
                shared.intermediate_size,
                bias=False,
                group=group,
                matrices=matrices,
            )
            self._shared_gate_format = matrices.format_of(f"{name}.{shared.name}_gate")
            self.shared_gate = empty_parameter(1, hidden_size) if shared.gated else None
        self.into_latent: MergedColumnLinear | None = None
        self.from_latent: MergedColumnLinear | None = None
        self._hidden = Share(hidden_size, 0, hidden_size)
        outer_size = spec.outer_size(hidden_size)
        if spec.latent_size is not None:
            latent = Share(outer_size, 0, outer_size)
            self.into_latent = MergedColumnLinear(
                name, hidden_size, {"fc1_latent_proj": latent}, bias=False, matrices=matrices
            )
            self.from_latent = MergedColumnLinear(
                name, outer_size, {"fc2_latent_proj": self._hidden}, bias=False, matrices=matrices
            )
        self.memory = ExpertMemory(
            f"{name}.experts",
            outer_size,
            spec,
            group=group,
            matrices=matrices,
            whole_experts=whole_experts,
            shared=self._like_experts() if fused else None,
        )
        self._kernels: ExpertsKernels | None = None
        self._router_extras = NO_EXTRAS  # as these kernels take them
        self._packed: ExpertWeights | None = None
        self._most_half_done = 0  # up to this many tokens the next reader takes half-done norms

    def _like_experts(self) -> GatedMLP | None:
        """The MLP that all tokens take, unless it reads other rows or computes anything other than
        experts do."""
        is_limited = isinstance(self.spec.gate, LimitedGate)
        is_alike = self.into_latent is None and not (self.spec.scales_inputs or is_limited)
        return self.shared if is_alike and isinstance(self.shared, GatedMLP) else None

    def lay_out(self) -> None:
        """Called before weights are loaded."""
        if self.memory.has_shared:
            assert isinstance(self.shared, GatedMLP)
            self.memory.lay_out(self.shared)

    def use_invariant_kernels(self, kernels: InvariantKernels) -> None:
        """Compute each token in an order that does not depend on the others, and the router by
        ``kernels``. Not with shared experts or router biases."""
        assert self.fused and self.shared is None and self.router.bias is None
        self.router.use_invariant_kernels(kernels)
        self._is_invariant = True

    def use_kernels(self, make: HopperExperts) -> None:
        """Compute all steps by kernels for Hopper if there are any for these weights, which must be
        bfloat16 or kept in a format that fits (``kernels.expert_cut``). Loaded codes are then
        permuted for these kernels."""
        memory, is_gated = self.memory, self.spec.gate is not None
        sizes = memory.outer.size, memory.inner.size
        if not expert_cut.knows(self.spec.routing):
            return
        if not expert_cut.fits(*sizes, memory.form, gated=is_gated):
            return
        if memory.has_shared:
            assert isinstance(self.shared, GatedMLP)
            memory.copy(self.shared)
        if memory.form is not None:
            self._packed = self.weights.packed()
        bias, factors = self.router.bias, self.router.factors
        self._router_extras = RouterExtras(
            bias=None if bias is None else bias.float(),
            correction=self.router.correction,
            factors=None if factors is None else factors.float(),
        )
        weights = self.weights
        self._kernels = make.kernels(
            self.spec.routing,
            (memory.held.start, memory.held.end),
            *weights.shapes,
            kinds=weights.kinds,
            gate=weights.gate,
            hidden_size=self._hidden.size,
            wide=self.router.is_wide,
            shared=memory.has_shared,
            scales_inputs=self.spec.scales_inputs,
        )

    @property
    def has_half_norms(self) -> bool:
        """Whether the input's norm may be half done (``Normed``)."""
        reads_rows = self._kernels is not None and self.into_latent is None
        return reads_rows and self.router.fits_tensor_cores

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute the router and the shared expert by ``kernels`` in steps that fit them. Only if
        ``has_half_norms``."""
        self._most_half_done = kernels.most_tokens
        self.router.use_tensor_cores(kernels)
        if self.shared is not None:
            assert isinstance(self.shared, GatedMLP)
            self.shared.use_tensor_cores(kernels, adds=False)

    def rounding(self, num_tokens: int) -> int | None:
        return None  # the router reads them as they are

    def forward(
        self,
        residual: Tensor,
        x: Normed,
        norm: RMSNorm,
        *,
        pdl: bool,
        adapted: AdaptedTokens | None = None,
    ) -> tuple[Tensor, Normed]:
        adds = self._has_kernel(x.x) and self.from_latent is None and self.group.size == 1
        if not adds:
            part = self.part(x, pdl=pdl, adapted=adapted)
            return residual, add_sum(residual, part, norm, self.group, pdl=pdl)
        outputs = self._outputs(x, pdl, adapted)
        half = len(x.x) <= self._most_half_done
        rows, squares = add_outputs(*outputs, residual, norm.weight, norm.eps, half=half, pdl=pdl)
        return residual, Normed(rows, norm if half else None, squares)

    def output(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """What ``forward`` adds, [num_tokens, hidden_size], for layers that change it first."""
        return self.group.all_reduce(self.part(x, pdl=pdl, adapted=adapted))

    def part_of(self, rows: Tensor, routed: Tensor, *, pdl: bool) -> Tensor:
        """This rank's part of the sum over the ranks, [num_tokens, hidden_size]. Experts read
        ``rows`` and are chosen by ``routed``, both [num_tokens, hidden_size] and normalized. Only
        without a shared expert."""
        if (kernels := self._kernels) is not None:
            of_experts = kernels(
                rows,
                self.router.weight,
                partial(self._logits, routed, pdl),
                self.weights,
                extras=self._router_extras,
                routed=routed,
                pdl=pdl,
            )
            return sum_outputs(*of_experts, pdl=pdl)
        choices = self._held(self.router(routed))
        if self.fused and has_kernel(rows, self.weights):
            return sum_outputs(expert_outputs(rows, self.weights, choices), choices, pdl=pdl)
        return fused_experts_reference(rows, self.weights, choices)

    def part(self, x: Normed, *, pdl: bool, adapted: AdaptedTokens | None = None) -> Tensor:
        """This rank's part of the sum over the ranks, [num_tokens, hidden_size]. Only the MLP that
        all tokens take has adapters."""
        if self._has_kernel(x.x):
            outputs, choices, shared = self._outputs(x, pdl, adapted)
            if self.from_latent is None:
                return sum_outputs(outputs, choices, shared, pdl=pdl)
            part = sum_outputs(outputs, choices, pdl=pdl)
        else:
            rows = x.normalized(pdl=pdl)
            shared = self._of_shared(Normed(rows), pdl, adapted)
            read, choices = self._routed(rows, pdl)
            if self._is_invariant:
                part = fused_experts(read, self.weights, choices, invariant=True)
            else:
                part = fused_experts_reference(read, self.weights, choices)
        if self.from_latent is not None:
            part = self.from_latent(Normed(part), pdl=pdl)
        return part if shared is None else shared.added_to(part)

    def _has_kernel(self, x: Tensor) -> bool:
        """Whether kernels compute ``_outputs``. Their bits may depend on the other tokens, so none
        do if the layer is invariant."""
        if self._is_invariant:
            return False
        return self._kernels is not None or (self.fused and has_kernel(x, self.weights))

    def _outputs(
        self, x: Normed, pdl: bool, adapted: AdaptedTokens | None
    ) -> tuple[Tensor, Choices, SharedOutput | None]:
        """The outputs of each token's experts, which experts these are, and the output of the
        shared expert, unless it is among them."""
        kernels = self._kernels
        if kernels is None:
            x = Normed(x.normalized(pdl=pdl))
            shared = self._of_shared(x, pdl, adapted)
            read, choices = self._routed(x.x, pdl)
            return expert_outputs(read, self.weights, choices), choices, shared
        rows, squares = x.unscaled(pdl=pdl)
        router, shared = self.router.weight, None
        is_choice = (
            self.memory.has_shared and adapted is None and kernels.takes_shared(len(rows), router)
        )
        if not is_choice:
            ready = Normed(rows, x.norm if squares is not None else None, squares)
            shared = self._of_shared(ready, pdl, adapted)
        read, routed = rows, None
        if self.into_latent is not None:
            read, routed = self.into_latent(Normed(rows), pdl=pdl), rows
        outputs, choices = kernels(
            read,
            router,
            partial(self._logits, rows, pdl),
            self.weights,
            extras=self._router_extras,
            routed=routed,
            with_shared=is_choice,
            shared_gate=self._gate_of_shared if is_choice else None,
            squares=squares,
            eps=x.eps,
            pdl=pdl,
        )
        return outputs, choices, shared

    def _logits(self, x: Tensor, pdl: bool, biased: bool) -> Tensor:
        return self.router.logits(x, biased=biased, pdl=pdl)

    def _of_shared(
        self, x: Normed, pdl: bool, adapted: AdaptedTokens | None
    ) -> SharedOutput | None:
        """This rank's part of the output of the shared expert, if there is one. The norm of ``x``
        is done or half done."""
        if self.shared is None:
            return None
        part = self.shared.part(x, pdl=pdl, adapted=adapted)
        if (gate := self._gate_of_shared) is None:
            return SharedOutput(part)
        return SharedOutput(part, gate, x.x, x.squares, x.eps)

    @property
    def _gate_of_shared(self) -> Tensor | None:
        """[hidden_size]"""
        return None if self.shared_gate is None else self.shared_gate[0]

    @property
    def weights(self) -> ExpertWeights:
        """The weights of the experts that this rank holds, in the order of the kernels."""
        return self.memory.weights if self._packed is None else self._packed

    def _routed(self, x: Tensor, pdl: bool) -> tuple[Tensor, Choices]:
        """What the experts read, which is ``x`` or scaled, [num_tokens, hidden_size], or its
        latent, [num_tokens, latent_size]; and which experts do."""
        choices = self._held(self.router(x))
        if self.into_latent is not None:
            return self.into_latent(Normed(x), pdl=pdl), choices
        if not self.spec.scales_inputs:
            return x, choices
        scaled = x * choices.weights.to(x.dtype)  # by that of a token's only expert
        return scaled, replace(choices, weights=torch.ones_like(choices.weights))

    def _held(self, choices: Choices) -> Choices:
        """``choices`` among all experts, as choices among those that this rank holds."""
        held = self.memory.held
        if held.size == held.total:
            return choices
        is_here = (choices.ids >= held.start) & (choices.ids < held.end)
        ids = torch.where(is_here, choices.ids - held.start, -1)
        return Choices(ids, choices.weights, elsewhere=True)

    def places(self) -> Iterator[tuple[str, Place]]:
        spec = self.spec
        for name, place in self.router.places():
            around = spec.router.rpartition(".")[0]
            is_beside = name.startswith("../")
            yield f"{around}.{name[3:]}" if is_beside else f"{spec.router}.{name}", place
        if self.shared is not None and spec.shared is not None:
            yield from collect_places(self.shared, spec.shared.name).items()
            if self.shared_gate is not None:
                one, gate = Share(1, 0, 1), self.shared_gate.data
                yield (
                    f"{spec.shared.name}_gate.weight",
                    place_in(gate, slice(None), self._shared_gate_format, one, self._hidden),
                )
        for linear in (self.into_latent, self.from_latent):
            for own, place in () if linear is None else linear.places():
                yield own.removeprefix("../"), place
        yield from collect_places(self.memory, "experts").items()
