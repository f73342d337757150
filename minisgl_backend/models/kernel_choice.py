"""Which layers of a model take this package's kernels for Hopper, once its weights are loaded.

Knows what the kernels can compute, and up to which batch they are the fastest. Each module itself
decides what it does with the kernels it is given. How they are cut is up to ``kernels.linear_cut``
and ``kernels.expert_cut``. Must not know config.json, files or plans.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.gates import Gate
from minisgl_backend.kernels import expert_cut, linear_cut
from minisgl_backend.kernels.small_batch import is_faster_for_a_token
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear, adapters_shape
from minisgl_backend.layers.matrix import DenseMatrix, Matrix
from minisgl_backend.layers.quantized_matrix import QuantizedMatrix
from minisgl_backend.layers.router import Router
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.gated_delta_net import GatedDeltaNet
from minisgl_backend.models.mtp import MTPLayer
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.packages import CUDA_BINDINGS, import_error
from minisgl_backend.weight_format import WeightFormat

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import TensorCores

_Linear: TypeAlias = MergedColumnLinear | RowLinear


def use_tensor_cores(model: Decoder, device: torch.device) -> None:
    """Make the layers compute steps of up to 256 tokens on Hopper's tensor cores, if there are
    kernels for all layers and these are faster. Only this function and ``has_fused_layers`` decide
    which models the kernels know. Compiles kernels that are not in the cache.

    Weights may be plain or quantized. A layer is then four GEMMs and whatever mixes tokens
    (``kernels.cuda.linear``). Norms, activations and residual adds happen inside the GEMMs, and for
    most models so do the rotation and the storing of keys and values (``SelfAttention``). With
    several ranks, the sums over the ranks are launched as well, and include the residual adds and
    norms that follow them. Pages must be bound. If some layers do not fit, quantized weights and
    plain ones that are not small still take the kernels, each separately.

    Experts have their own kernels (``kernels.cuda.expert_layers``), for any number of tokens, and
    layers with recurrent states one for decode steps (``kernels.cuda.delta_step``). They are used
    if they fit, whatever the rest of a layer takes. States must be bound, too.
    """
    if not has_hopper_kernels(device, model.dtype):
        return
    # these modules import the CUDA driver's bindings, which only installations for GPUs have
    expert_layers = importlib.import_module("minisgl_backend.kernels.cuda.expert_layers")
    experts = expert_layers.HopperExperts(device)
    for module in model.modules():
        if isinstance(module, ExpertsMLP) and module.fused:
            module.use_kernels(experts)
    _use_step_kernel(model, device)
    make = importlib.import_module("minisgl_backend.kernels.cuda.linear").TensorCores
    in_layers = [linear for layer in model.layers for linear in _within(layer)]
    are_whole = (
        has_fused_layers(model.spec)
        and all(
            not isinstance(layer.mlp, ExpertsMLP) or layer.mlp.has_half_norms
            for layer in model.layers
        )
        and all(_fits(linear, gate) for linear, gate in in_layers)
    )
    kernels_for = functools.cache(functools.partial(make, device))
    _use_rounded_head(model, kernels_for)
    if are_whole:
        linears_of = [[linear for linear, _ in _within(layer)] for layer in model.layers]
        most_tokens = min(_largest_batch(linears, linears) for linears in linears_of)
        if most_tokens:
            model.use_tensor_cores(make(device, most_tokens))
        if model.mtp is not None:
            _use_separately(model.mtp.outside_kernels, kernels_for)
        return
    batches = [_use_separately(layer, kernels_for) for layer in model.main_layers]
    if model.mtp is not None:
        _use_separately(model.mtp, kernels_for)
    if model.group.size == 1:
        model.start_early(min(batches))


def _use_separately(layer: nn.Module, kernels_for: Callable[[int], TensorCores]) -> int:
    """Give the kernels, made for a largest batch, to each weight of ``layer``, or of a part of one,
    that gains. Returns the largest batch that all these weights leave to them."""
    linears = list(_linears(layer))
    # before batches are chosen: these depend on how a weight is arranged
    fitting = [_fits(linear, gate) for linear, gate in linears]
    most = linear_cut.MAX_TOKENS
    for (linear, gate), fits in zip(linears, fitting, strict=True):
        matrix, of_this = linear.matrix, 0
        gains = linear_cut.gains_alone(matrix.out_features, matrix.in_features)
        if fits and (gains or isinstance(matrix, QuantizedMatrix)):
            of_this = _largest_batch([linear], [other for other, _ in linears])
        most = min(most, of_this)
        if not of_this:
            continue
        # one row may be streamed before a sum over ranks, too: with several ranks these layers do
        # not start kernels early
        matrix.use_tensor_cores(
            kernels_for(of_this),
            gate=gate,
            adapters=adapters_shape(linear),
            streams_a_row=is_faster_for_a_token(
                matrix.out_features, matrix.in_features, gated=gate is not None, alone=True
            ),
        )
    return most


def round_mtp_head(model: Decoder, device: torch.device) -> None:
    """Let an MTP layer guess with a copy of the output head in 8 bits, if the head is plain and
    there are kernels for the copy. Comes before pages take the memory that is left."""
    mtp = model.mtp
    if not isinstance(mtp, MTPLayer) or not has_hopper_kernels(device, model.dtype):
        return
    head, height = model.head, linear_cut.padded(model.head.share)
    is_plain = isinstance(head.matrix, DenseMatrix)
    if is_plain and linear_cut.takes_codes(height, model.spec.hidden_size):
        mtp.round_head(head)


def _use_rounded_head(model: Decoder, kernels_for: Callable[[int], TensorCores]) -> None:
    """Give the kernels to what ``round_mtp_head`` has made."""
    matrix = model.mtp.rounded_head if isinstance(model.mtp, MTPLayer) else None
    if matrix is None or not matrix.fits_tensor_cores():
        return
    elements = matrix.out_features * matrix.in_features
    most = linear_cut.largest_batch(elements, of_codes=True, float8=matrix.takes_float8)
    matrix.use_tensor_cores(kernels_for(most))


def _use_step_kernel(model: Decoder, device: torch.device) -> None:
    """Give layers with recurrent states the kernel for decode steps of many rows, if it fits."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, GatedDeltaNet)]
    if not mixers:
        return
    module = importlib.import_module("minisgl_backend.kernels.cuda.delta_step")
    shape, matrices = mixers[0].local, mixers[0].states.matrices
    is_known = (shape.key_dim, shape.value_dim) == (module.HEAD_DIM, module.HEAD_DIM)
    if is_known and shape.rate_scale == 1.0:
        kernel = module.DeltaStepKernel(
            shape.num_key_heads, shape.num_heads, shape.conv_width, matrices.dtype, device
        )
        for mixer in mixers:
            mixer.use_step_kernel(kernel)


def _largest_batch(linears: Sequence[_Linear], of_layer: Sequence[_Linear]) -> int:
    """The largest batch for which kernels on tensor cores are fastest for ``linears``, which are
    all or some of a layer's."""
    quantized = [
        matrix for linear in linears if isinstance(matrix := linear.matrix, QuantizedMatrix)
    ]
    sizes = [(linear.matrix.out_features, linear.matrix.in_features) for linear in of_layer]
    return linear_cut.largest_batch(
        sum(height * in_features for height, in_features in sizes),
        of_codes=bool(quantized),
        float8=bool(quantized) and all(matrix.takes_float8 for matrix in quantized),
        adapted=any(adapters_shape(linear) is not None for linear in linears),
    )


def _linears(module: nn.Module) -> Iterator[tuple[_Linear, Gate | None]]:
    """The linear layers in ``module``, and the gates of those that have one."""
    for child in module.modules():
        if isinstance(child, MergedColumnLinear):
            yield child, child.gate
        elif isinstance(child, RowLinear):
            yield child, None


def _within(layer: nn.Module) -> Iterator[tuple[_Linear, Gate | None]]:
    """The same without an MTP layer's projection of its inputs, which stands before the layer."""
    before = layer.eh_proj if isinstance(layer, MTPLayer) else None
    yield from ((linear, gate) for linear, gate in _linears(layer) if linear is not before)


def _fits(linear: _Linear, gate: Gate | None) -> bool:
    return linear.matrix.fits_tensor_cores(gated=gate is not None)


def has_hopper_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the CUDA C++ kernels for Hopper can be compiled for this GPU and take this dtype."""
    if torch.cuda.get_device_capability(device) != (9, 0) or import_error("cuda.bindings"):
        return False
    return dtype == torch.bfloat16


def has_expert_kernels(form: WeightFormat, spec: ModelSpec, parts: int) -> bool:
    """Whether these kernels take experts' weights in this format, each cut into ``parts``."""
    if spec.moe is None:
        return False
    experts = spec.moe.experts
    sizes = experts.outer_size(spec.hidden_size), experts.intermediate_size // parts
    is_gated = experts.gate is not None
    return expert_cut.knows(experts.routing) and expert_cut.fits(*sizes, form, gated=is_gated)


def use_invariant_kernels(model: Decoder, device: torch.device) -> None:
    """Compute every step so that a token's values do not depend on the step's other tokens (the
    option ``batch_invariant``). Compiles kernels that are not in the cache.

    Raises ``ConfigError`` if there are no such kernels for a weight, the dtype or the device.
    ``model_check`` checks what layers may consist of.
    """
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise ConfigError("option batch_invariant needs a GPU of compute capability 9.0 (Hopper)")
    error = import_error("cuda.bindings")
    if error is not None:
        raise ConfigError(f"option batch_invariant needs cuda.bindings ({error}): {CUDA_BINDINGS}")
    if model.dtype != torch.bfloat16:
        name = str(model.dtype).removeprefix("torch.")
        raise ConfigError(f"option batch_invariant needs dtype bfloat16, not {name}")
    head_dim = model.spec.heads.head_dim
    if head_dim not in linear_cut.HEAD_DIMS:
        raise ConfigError(
            f"option batch_invariant needs heads of 64 or 128 elements, not {head_dim}"
        )
    modules = [module for layer in model.layers for module in layer.modules()]
    matrices = [module for module in modules if isinstance(module, Matrix)] + [model.head.matrix]
    sizes = [(matrix.out_features, matrix.in_features) for matrix in matrices]
    sizes += [(len(of.weight), of.weight.shape[1]) for of in modules if isinstance(of, Router)]
    for height, in_features in sizes:
        reason = linear_cut.why_not_invariant(height, in_features)
        if reason is not None:
            raise ConfigError(
                f"option batch_invariant: a weight of {height} x {in_features} {reason}"
            )
    # imports the CUDA driver's bindings, which only installations for GPUs have
    module = importlib.import_module("minisgl_backend.kernels.cuda.invariant_linear")
    model.use_invariant_kernels(module.InvariantKernels(device))


def has_fused_layers(spec: ModelSpec) -> bool:
    """Whether the kernels for whole layers (``use_tensor_cores``) know everything that the layers
    of such a model compute. Sizes and weight formats, which also matter, are not checked here.

    The kernels do not know several residual streams, norms of the outputs of a layer's parts,
    LayerNorms, layers of a single part, of parts side by side or of two mixers, latent attention,
    blocks without gates, experts with a latent, a norm of their output or limits of gates in some
    layers, or routers that compute in float32 or that ``expert_cut`` does not know.
    """
    if spec.moe is not None:
        rule, latent_size = spec.moe.experts.routing, spec.moe.experts.latent_size
        if spec.moe.normed or spec.moe.limits or latent_size is not None:
            return False
        if rule.wide or not expert_cut.knows(rule):
            return False
    has_two_parts = not spec.single_parts and spec.parallel is None and spec.streams is None
    is_known = spec.gate is not None and spec.latent is None and not spec.norms.centered
    return spec.norms.place == "before" and is_known and has_two_parts
