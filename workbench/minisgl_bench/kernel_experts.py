"""The cases of `minisgl bench kernels` for experts, whose weights are plain or quantized.

A ``Form`` is the shape of a model's experts and how their weights are stored; a layer of one has
random numbers. Must not know how calls are timed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.experts_spec import RoutingRule
from minisgl_backend.gates import ClampedGate, Gate
from minisgl_backend.kernels.experts import ExpertWeights, fused_experts, sum_outputs
from minisgl_backend.kernels.packed_weight import PackedWeight
from minisgl_backend.kernels.quantized import QuantizedWeight, quantize, stacked
from minisgl_backend.kernels.routing import choose
from minisgl_backend.weight_format import GROUP_OF_NVFP4, Encoding
from minisgl_bench.kernel_cases import Case, copies, each

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts


@dataclass(frozen=True)
class Form:
    """The form of a layer's expert weights; they are quantized in blocks of ``block`` unless
    ``encoding`` is None."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    encoding: Encoding | None = None
    block: tuple[int, int] = (1, 1)
    symmetric: bool = True
    gate: Gate | ClampedGate | None = "silu"
    biases: bool = False

    @property
    def rule(self) -> RoutingRule:
        return RoutingRule(num_experts=self.num_experts, top_k=self.top_k, normalize=True)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        rows = self.inner if self.gate is None else 2 * self.inner
        up, down = (rows, self.hidden), (self.hidden, self.inner)
        return (self.num_experts, *up), (self.num_experts, *down)

    @property
    def bits(self) -> int:
        return 16 if self.encoding is None else self.encoding.bits

    def made(self, device: torch.device) -> ExpertWeights:
        """The weights of a layer."""
        up, down = (self._normal(shape, device) for shape in self.shapes)
        of_up, of_down = (
            self._normal(shape[:2], device) if self.biases else None for shape in self.shapes
        )
        if self.encoding is None:
            return ExpertWeights(up, down, of_up, of_down, self.gate)
        weights = self._quantized(up), self._quantized(down)
        return ExpertWeights(*weights, of_up, of_down, self.gate).packed()

    @staticmethod
    def _normal(shape: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)

    def _quantized(self, weight: Tensor) -> QuantizedWeight:
        assert self.encoding is not None
        return stacked(
            [quantize(x, self.encoding, self.block, symmetric=self.symmetric) for x in weight]
        )


_QWEN: Final = (128, 8, 2048, 768)
_GEMMA: Final = (128, 8, 2816, 704)
_NEMOTRON: Final = (128, 6, 2688, 1856)
FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        "bf16": Form(*_QWEN),
        "fp8": Form(*_QWEN, Encoding.E4M3, (128, 128)),
        "int4": Form(*_QWEN, Encoding.INT4, (1, 128), symmetric=False),
        "nvfp4": Form(*_QWEN, Encoding.E2M1, (1, GROUP_OF_NVFP4)),
        "mxfp4": Form(
            32, 4, 2880, 2880, Encoding.E2M1, (1, 32), gate=ClampedGate(1.702, 7.0), biases=True
        ),
        "gelu": Form(*_GEMMA, gate="gelu"),
        "gelu-fp8": Form(*_GEMMA, Encoding.E4M3, (128, 128), gate="gelu"),
        "relu2": Form(*_NEMOTRON, gate=None),
        "relu2-fp8": Form(*_NEMOTRON, Encoding.E4M3, (1, 2688), gate=None),
    }
)
"""Qwen3-30B-A3B's experts in four formats, gpt-oss-20b's, Gemma 4 26B-A4B's in two, and those of
Nemotron 3 Nano 30B-A3B, in bfloat16 and in FP8 per channel."""

EXPERT_MODELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "qwen3-30b-a3b": ("bf16", "fp8", "int4", "nvfp4"),
        "gpt-oss-20b": ("mxfp4",),
        "gemma-4-26b-a4b": ("gelu", "gelu-fp8"),
        "nemotron-3-nano-30b-a3b": ("relu2", "relu2-fp8"),
    }
)
"""The forms of each model's experts."""

_MOST_LAYERS: Final = 8
"""No more layers are needed to keep the weights of a call out of the L2 cache."""


def weight_bytes(experts: ExpertWeights, num_used: int) -> int:
    """The bytes of ``num_used`` experts: numbers, or codes and scales as kernels read them, and
    biases."""
    parts: list[Tensor | None] = [experts.gate_up_bias, experts.down_bias]
    for weight in (experts.gate_up, experts.down):
        if isinstance(weight, Tensor):
            parts.append(weight)
        elif isinstance(weight, PackedWeight):
            parts += [weight.weight.codes, weight.scales, weight.row_scales]
        else:
            parts += [weight.codes, weight.scales, weight.zeros, weight.row_scales]
    held = sum(part.numel() * part.element_size() for part in parts if part is not None)
    return held * num_used // experts.num_experts


def expert_cases(model: str, batch_size: int) -> Iterator[Case]:
    """For each form of a model's experts: routing, both products and the sum by the kernels for
    Hopper; for plain weights also the kernels in Triton, without the router.

    Bytes are those of the weights of the experts to which tokens go, and of the tokens before and
    after them. Each call has other weights, and tokens that choose alike.
    """
    device = torch.device("cuda")
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    for name in EXPERT_MODELS[model]:
        form = FORMS[name]
        if not is_hopper and form.encoding is not None:
            continue
        first = form.made(device)
        router = torch.randn(form.num_experts, form.hidden, device=device, dtype=torch.bfloat16)
        router *= form.hidden**-0.5
        x = torch.randn(batch_size, form.hidden, device=device, dtype=torch.bfloat16)
        choices = choose(F.linear(x, router), form.rule)
        used = weight_bytes(first, len(set(choices.ids.flatten().tolist())))
        num_layers = min(_MOST_LAYERS, len(copies(used)))
        layers = [first, *(copy.deepcopy(first) for _ in range(num_layers - 1))]
        num_bytes = used + 2 * x.numel() * x.element_size()
        if form.encoding is None:
            calls = each(fused_experts, [(x, experts, choices) for experts in layers])
            yield Case(f"{name} experts, Triton", num_bytes, calls)
        if is_hopper:
            calls = each(_routed, [(x, router, experts, form.rule) for experts in layers])
            yield Case(f"{name} experts", num_bytes, calls)


def _routed(x: Tensor, router: Tensor, experts: ExpertWeights, rule: RoutingRule) -> Tensor:
    """The sum over each token's experts, [num_tokens, hidden_size], by the kernels for Hopper."""
    kernels = _hopper_experts().kernels(
        rule,
        (0, rule.num_experts),
        *experts.shapes,
        kinds=experts.kinds,
        gate=experts.gate,
        hidden_size=router.shape[1],
        wide=False,
    )
    outputs = kernels(x, router, lambda _: F.linear(x, router), experts, pdl=True)
    return sum_outputs(*outputs, pdl=True)  # as in a layer


@functools.cache
def _hopper_experts() -> HopperExperts:
    """The same object for all numbers of rows, so that each kernel is compiled once."""
    # needs the CUDA driver's bindings, which only installations for GPUs have
    from minisgl_backend.kernels.cuda.expert_layers import HopperExperts

    return HopperExperts(torch.device("cuda"))
