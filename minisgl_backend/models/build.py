"""A model, ready to compute, from its spec and its folder.

Modules are first made on the meta device, so that nothing is allocated or initialized twice. Must
not know config.json, pages or plans: of an architecture it knows the spec alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels import expert_cut, linear_cut
from minisgl_backend.layers.experts import ExpertsMLP, Router
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear, takes_adapters
from minisgl_backend.layers.matrix import Matrix
from minisgl_backend.layers.norm import HeadNorm
from minisgl_backend.layers.quantized_matrix import Matrices, QuantizedMatrix
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import FLOATS, collect_places
from minisgl_backend.models.checkpoint import WeightHeader, weight_files
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.kv_scales import is_kv_scale
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import StoredAs
from minisgl_backend.models.token_mixing import SelfAttention
from minisgl_backend.models.weights import fill_random, load_weights
from minisgl_backend.packages import CUDA_BINDINGS, import_error
from minisgl_backend.parallel.group import Group
from minisgl_backend.progress import Progress, unseen
from minisgl_backend.weight_format import Layout, WeightFormat, WeightFormats

logger = logging.getLogger(__name__)

_EXPERT: Final = re.compile(r".+\.experts\.\d+(?=\.)")


def build_model(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    load_format: str = "auto",
    max_sequence_length: int | None = None,
    seed: int = 0,
    fused: bool | None = None,
    fused_experts: bool | None = None,
    whole_experts: bool = False,
    keep_quantized: bool = False,
    keeps_experts: Callable[[WeightFormat], bool] | None = None,
    progress: Progress = unseen,
) -> Decoder:
    """This rank's part of the model in ``folder``.

    ``load_format`` ``auto`` reads safetensors; ``dummy`` makes random weights from ``seed`` and
    reads none. ``max_sequence_length`` bounds the positions, by default to the model's context.
    ``fused`` and ``fused_experts``: computed by this package's kernels, by default on a GPU.
    ``whole_experts``: ranks share out the experts of a layer, rather than slices of each.
    ``keep_quantized``: quantized weights stay as they are, for this package's kernels on a GPU and
    to be dequantized for each use on a CPU; else they are dequantized while they are loaded.
    ``keeps_experts`` says in which formats those of experts do, by default the same. Raises
    ``ConfigError`` if the checkpoint does not fit the spec.
    """
    on_gpu = device.type == "cuda"
    matrices = Matrices(
        _format_of(spec, folder, load_format),
        keeps=lambda form: keep_quantized,
        keeps_experts=keeps_experts or (lambda form: keep_quantized),
        fused=on_gpu if fused is None else fused,
    )
    with torch.device("meta"):
        model = Decoder(
            spec,
            group,
            matrices=matrices,
            fused_experts=on_gpu if fused_experts is None else fused_experts,
            whole_experts=whole_experts,
        )
    _cast(model, dtype)
    model.to_empty(device=device)
    for module in model.modules():
        if isinstance(module, (MergedColumnLinear, RowLinear)):
            module.matrix.lay_out(device)
        elif isinstance(module, HeadNorm) and not module.weighted:
            module.reset()
    if load_format == "dummy":
        fill_random(collect_places(model), seed, dtype)
    elif load_format == "auto":
        load_weights(
            collect_places(model),
            folder,
            names=spec.names,
            is_ignored=_has_no_place(model),
            progress=progress,
        )
    else:
        raise ConfigError(f"load_format must be auto or dummy, got {load_format!r}")
    if spec.weights is not None:
        _log_quantized(model, spec.weights, dtype)
    model.set_positions(max_sequence_length or spec.context, device)
    return model.eval()


def _has_no_place(model: Decoder) -> Callable[[str], bool]:
    """Whether a tensor of the checkpoint, by its name, rightly has no place in this rank's model:
    scales of keys and values, which ``kv_scales`` reads; a head that is tied to the embedding; and
    experts that other ranks hold."""
    elsewhere = {
        expert
        for module in model.modules()
        if isinstance(module, ExpertsMLP)
        for expert in module.elsewhere()
    }

    def has_no_place(name: str) -> bool:
        if is_kv_scale(name) or (model.spec.tie_embeddings and name.startswith("lm_head.")):
            return True
        expert = _EXPERT.match(name)
        return expert is not None and expert[0] in elsewhere

    return has_no_place


def _log_quantized(model: Decoder, weights: WeightFormats, dtype: torch.dtype) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    is_any_kept = any(isinstance(module, StoredWeight) for module in model.modules())
    logger.info(
        "weights: %s, %s %s, take %.2f GiB",
        weights,
        "kept, or dequantized to" if is_any_kept else "dequantized while loading to",
        str(dtype).removeprefix("torch."),
        num_bytes / 2**30,
    )


def _format_of(
    spec: ModelSpec, folder: Path, load_format: str
) -> Callable[[str], WeightFormat | None]:
    """How each projection is stored: as config.json says, by the checkpoint's names or by the
    decoder's, unless the checkpoint holds its plain weight, as tools leave routers and other
    modules that config.json does not always list."""
    weights = spec.weights
    if weights is None:
        return lambda name: None
    headers: dict[str, WeightHeader] = {}
    if load_format == "auto":
        for held in weight_files(folder, spec.names).values():
            headers |= held
    theirs: dict[str, str] = {}  # the checkpoint's names of modules
    for weight, stored in headers.items():
        module, _, kind = weight.rpartition(".")
        theirs.setdefault(module, stored.stored.name.removesuffix(f".{kind}"))

    def format_of(name: str) -> WeightFormat | None:
        form = weights.of(name, theirs.get(name, spec.names.merged_module(name)))
        if form is None or form.layout is Layout.CONVERTED:
            return form
        header = headers.get(f"{name}.weight")
        if header is not None and header.dtype in FLOATS:
            return None
        if header is not None and form.layout is Layout.FP8:
            _check_blocks(form, header.stored)
        return form

    return format_of


def _check_blocks(form: WeightFormat, stored: StoredAs) -> None:
    """Raise ``ConfigError`` if a weight is the lower half of a tensor, a block of scales may reach
    into it from the upper half, and the number of scales does not tell."""
    rows = form.block[0]
    begins = [part.start for part in stored.region if isinstance(part, slice)]
    for begin in begins if rows else ():
        of_halves, of_all = 2 * -(-begin // rows), -(-2 * begin // rows)
        if begin % rows and of_halves == of_all:
            raise ConfigError(
                f"{stored.name}: blocks of {rows} rows may lie across row {begin}, which parts "
                "gates and ups"
            )


def use_tensor_cores(model: Decoder, device: torch.device) -> None:
    """Let the layers compute steps of up to 256 tokens on Hopper's tensor cores, if there are
    kernels for all of them and these are faster. Which models they know is decided by
    ``has_fused_layers`` and here only. Compiles those that are not in the cache.

    Weights may be plain or quantized. A layer is then four GEMMs and attention
    (``kernels.cuda.linear``): norms, rotation, storing of keys and values, activations and residual
    adds happen inside the GEMMs. With several ranks the sums over the ranks are launched as well,
    and include the residual adds and norms that follow them. Pages must be bound. If some layers do
    not fit, quantized weights still take the kernels, each for itself.

    Experts have kernels of their own (``kernels.cuda.experts``), for any number of tokens, which
    serve if they fit, whatever the rest of a layer takes.
    """
    if not has_hopper_kernels(device, model.dtype):
        return
    # these modules import the CUDA driver's bindings, which only installations for GPUs have
    experts = importlib.import_module("minisgl_backend.kernels.cuda.experts").HopperExperts(device)
    for layer in model.layers:
        if isinstance(layer.mlp, ExpertsMLP) and layer.mlp.fused:
            layer.mlp.use_kernels(experts)
    if model.spec.head_dim not in (64, 128):
        return
    make = importlib.import_module("minisgl_backend.kernels.cuda.linear").TensorCores
    in_layers = list(_linears(model.model.layers))
    are_whole = (
        has_fused_layers(model.spec)
        and all(
            isinstance(layer.mixer, SelfAttention)
            and (not isinstance(layer.mlp, ExpertsMLP) or layer.mlp.has_half_norms)
            for layer in model.layers
        )
        and all(linear.matrix.fits_tensor_cores(gated=gated) for linear, gated in in_layers)
    )
    if are_whole:
        of_layer = [linear.matrix for linear, _ in _linears(model.layers[0])]
        most_tokens = _largest_batch(of_layer)
        if most_tokens:
            model.use_tensor_cores(make(device, most_tokens))
        return
    kernels_for = functools.cache(functools.partial(make, device))
    for linear, gated in in_layers:
        matrix = linear.matrix
        if isinstance(matrix, QuantizedMatrix) and matrix.fits_tensor_cores(gated=gated):
            kernels = kernels_for(_largest_batch([matrix]))
            if isinstance(linear, MergedColumnLinear):
                linear.use_tensor_cores(kernels)
            else:
                matrix.use_tensor_cores(kernels, takes_adapters=takes_adapters(linear))


def _largest_batch(matrices: Sequence[Matrix]) -> int:
    """Up to which batch kernels on tensor cores are the fastest for all of them together."""
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    return linear_cut.largest_batch(
        sum(matrix.out_features * matrix.in_features for matrix in matrices),
        of_codes=bool(quantized),
        float8=bool(quantized) and all(matrix.takes_float8 for matrix in quantized),
    )


def _linears(module: nn.Module) -> Iterator[tuple[MergedColumnLinear | RowLinear, bool]]:
    """The linear layers in ``module``, and whether they are gated."""
    for child in module.modules():
        if isinstance(child, MergedColumnLinear):
            yield child, child.gated
        elif isinstance(child, RowLinear):
            yield child, False


def has_hopper_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the CUDA C++ kernels for Hopper can be compiled for this GPU, and take this dtype."""
    if torch.cuda.get_device_capability(device) != (9, 0) or import_error("cuda.bindings"):
        return False
    return dtype == torch.bfloat16


def has_expert_kernels(form: WeightFormat, spec: ModelSpec, parts: int) -> bool:
    """Whether these kernels take experts' weights in this format, each cut into ``parts``."""
    if spec.moe is None:
        return False
    experts = spec.moe.experts
    size = experts.intermediate_size // parts
    return expert_cut.knows(experts) and expert_cut.fits(spec.hidden_size, size, form)


def use_invariant_kernels(model: Decoder, device: torch.device) -> None:
    """Compute every step so that a token's values do not depend on its other tokens (the option
    ``batch_invariant``). Compiles kernels that are not in the cache.

    Raises ``ConfigError`` if there are no such kernels for a weight, the dtype or the device; what
    layers may consist of is checked by ``precheck``.
    """
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise ConfigError("option batch_invariant needs a GPU of compute capability 9.0 (Hopper)")
    error = import_error("cuda.bindings")
    if error is not None:
        raise ConfigError(f"option batch_invariant needs cuda.bindings ({error}): {CUDA_BINDINGS}")
    if model.dtype != torch.bfloat16:
        name = str(model.dtype).removeprefix("torch.")
        raise ConfigError(f"option batch_invariant needs dtype bfloat16, not {name}")
    if model.spec.head_dim not in (64, 128):
        raise ConfigError(
            f"option batch_invariant needs heads of 64 or 128 elements, not {model.spec.head_dim}"
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
    """Whether the kernels for whole layers (``use_tensor_cores``) know all that the layers of such
    a model compute; sizes and weight formats, on which they also depend, aside.

    They do not know layers without attention, gates of its output, norms of the outputs of a
    layer's parts or over all heads of a token, another gate than SiLU, heads of which a part
    rotates or neighbouring dimensions do together, nor experts that ``expert_cut`` does not know,
    that have biases, as their router has then, or beside which there is a gated one.
    Heads that do not rotate at all are no exception to them.
    """
    ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
    experts = None if spec.moe is None else spec.moe.experts
    if experts is not None:
        is_gated = experts.shared is not None and experts.shared.gated
        if is_gated or experts.biases or not expert_cut.knows(experts):
            return False
    return (
        spec.delta_net is None
        and not spec.gated_attention
        and spec.norms == "before"
        and not spec.gelu
        and spec.qk_norm != "token"
        and all(rope is None or (rope.rotated == 1.0 and not rope.interleaved) for rope in ropes)
    )


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters ``dtype``; a matrix decides for itself which of its own have it."""
    if isinstance(module, (Matrix, StoredWeight, Router)):
        module.cast(dtype)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)
    for child in module.children():
        _cast(child, dtype)
