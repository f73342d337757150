"""A model, ready to compute, from its spec and its folder.

Modules are first made on the meta device, so that nothing is allocated or initialized twice. Must
not know config.json, pages or plans: it knows an architecture only by its spec.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.hyper_connection import HyperConnection
from minisgl_backend.layers.linear import MergedColumnLinear, RowLinear
from minisgl_backend.layers.matrix import Matrix
from minisgl_backend.layers.norm import HeadNorm, RMSNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.router import Router
from minisgl_backend.layers.stored_weight import StoredWeight
from minisgl_backend.layers.weight_place import FLOATS, collect_places
from minisgl_backend.models.checkpoint import WeightHeader, weight_files
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.eagle import DraftedTokens, EagleLayer
from minisgl_backend.models.eagle_checkpoint import EAGLE_NAMES, EAGLE_NEEDLESS
from minisgl_backend.models.kv_scales import is_kv_scale
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.tensor_names import StoredAs
from minisgl_backend.models.weights import fill_random, load_weights
from minisgl_backend.parallel.group import Group
from minisgl_backend.progress import Progress, unseen
from minisgl_backend.weight_format import CONVERT_TO_FP8, Layout, WeightFormat, WeightFormats

logger = logging.getLogger(__name__)

_EAGLE: Final = "eagle."
"""How the names of places of an EAGLE-3 layer begin, which is a checkpoint of its own."""
_EXPERT: Final = re.compile(r".+\.experts\.\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoices:
    """What kernels compute, and which weights stay quantized for them.

    ``fused`` and ``fused_experts``: computed by this package's kernels, by default on a GPU.
    ``keep_quantized``: quantized weights stay quantized, on a GPU for this package's kernels, on a
    CPU to be dequantized for each use; otherwise they are dequantized while they are loaded.
    ``keeps_experts`` says in which formats experts' weights stay quantized, by default the same,
    and ``takes`` in which sizes [out_features, in_features] others do, by default in all.
    """

    fused: bool | None = None
    fused_experts: bool | None = None
    keep_quantized: bool = False
    keeps_experts: Callable[[WeightFormat], bool] | None = None
    takes: Callable[[WeightFormat, int, int], bool] | None = None


KERNELS_BY_DEVICE: Final = KernelChoices()
"""What a kind of device has by default."""


def build_model(
    spec: ModelSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    load_format: str = "auto",
    max_sequence_length: int | None = None,
    eagle: Path | None = None,
    seed: int = 0,
    whole_experts: bool = False,
    kernels: KernelChoices = KERNELS_BY_DEVICE,
    progress: Progress = unseen,
) -> Decoder:
    """This rank's part of the model in ``folder``.

    ``load_format`` ``auto`` reads safetensors; ``dummy`` makes random weights from ``seed`` and
    reads none. ``max_sequence_length`` bounds the positions, by default to the model's context.
    ``eagle`` is the folder of an EAGLE-3 layer, if the spec has one.
    ``whole_experts``: each rank has some of a layer's experts, rather than a slice of each.
    Raises ``ConfigError`` if the checkpoint does not fit the spec.
    """
    on_gpu = device.type == "cuda"
    matrices = Matrices(
        _format_of(spec, folder, load_format),
        keep_quantized=kernels.keep_quantized,
        keeps_experts=kernels.keeps_experts or (lambda form: kernels.keep_quantized),
        fused=on_gpu if kernels.fused is None else kernels.fused,
        takes=kernels.takes or (lambda form, out_features, in_features: True),
    )
    with torch.device("meta"):
        model = Decoder(
            spec,
            group,
            matrices=matrices,
            fused_experts=on_gpu if kernels.fused_experts is None else kernels.fused_experts,
            whole_experts=whole_experts,
        )
    _cast(model, dtype)
    _allocate(model, device)
    _lay_out(model, device)
    if load_format == "dummy":
        fill_random(collect_places(model), seed, dtype)
    elif load_format == "auto":
        places = collect_places(model)
        load_weights(
            {name: places[name] for name in places if not name.startswith(_EAGLE)},
            folder,
            names=spec.names,
            is_ignored=_has_no_place(model),
            progress=progress,
        )
        if model.eagle is not None:
            assert eagle is not None
            _load_eagle(model.eagle, eagle, progress)
    else:
        raise ConfigError(f"load_format must be auto or dummy, got {load_format!r}")
    for module in model.modules():
        if isinstance(module, Router):
            module.narrow(dtype)
    if spec.weights is not None:
        _log_quantized(model, spec.weights, dtype)
    model.set_positions(max_sequence_length or spec.context, device)
    return model.eval()


def _load_eagle(layer: EagleLayer, folder: Path, progress: Progress) -> None:
    """Fill the layer from its own checkpoint. Raises ``ConfigError``, which says that it is this
    one."""
    try:
        load_weights(
            collect_places(layer),
            folder,
            names=EAGLE_NAMES,
            is_ignored=lambda name: name in EAGLE_NEEDLESS,
            progress=progress,
        )
    except ConfigError as error:
        raise ConfigError(f"option speculative_mtp_model: {error}") from error


def _has_no_place(model: Decoder) -> Callable[[str], bool]:
    """Tells by name whether a tensor of the checkpoint rightly has no place in this rank's model:
    scales of keys and values, which ``kv_scales`` reads; a head that is the embedding once more;
    and experts that other ranks hold."""
    elsewhere = {
        expert
        for module in model.modules()
        if isinstance(module, ExpertsMLP)
        for expert in module.memory.elsewhere()
    }

    def has_no_place(name: str) -> bool:
        if is_kv_scale(name) or (model.spec.tie_embeddings and name.startswith("lm_head.")):
            return True
        expert = _EXPERT.match(name)
        return expert is not None and expert[0] in elsewhere

    return has_no_place


def weight_bytes(model: Decoder) -> int:
    """The bytes of a model's weights. Memory that two weights share, as a shared expert may with
    the other experts, counts once."""
    memories = [parameter.untyped_storage() for parameter in model.parameters()]
    return sum({memory.data_ptr(): memory.nbytes() for memory in memories}.values())


def _log_quantized(model: Decoder, weights: WeightFormats, dtype: torch.dtype) -> None:
    is_any_kept = any(isinstance(module, StoredWeight) for module in model.modules())
    logger.info(
        "weights: %s, %s %s, take %.2f GiB",
        weights,
        "kept, or dequantized to" if is_any_kept else "dequantized while loading to",
        str(dtype).removeprefix("torch."),
        weight_bytes(model) / 2**30,
    )


def _format_of(
    spec: ModelSpec, folder: Path, load_format: str
) -> Callable[[str], WeightFormat | None]:
    """How each projection is stored: as config.json says, by the checkpoint's names or by the
    decoder's, unless the checkpoint holds its plain weight. Tools leave routers and other modules
    plain, which config.json does not always list."""
    weights = spec.weights
    if weights is None:
        return lambda name: None
    if weights == CONVERT_TO_FP8:  # no tool wrote its rules: they have only the decoder's names
        return weights.of
    headers: dict[str, WeightHeader] = {}
    if load_format == "auto":
        for held in weight_files(folder, spec.names).values():
            headers |= held
    theirs: dict[str, str] = {}  # the checkpoint's names of modules
    for weight, stored in headers.items():
        module, _, kind = weight.rpartition(".")
        theirs.setdefault(module, stored.stored.name.removesuffix(f".{kind}"))

    def names_there(name: str) -> tuple[str, str]:
        """What tools may call a module that the checkpoint does not hold."""
        names = spec.names
        spelled = names.in_checkpoint(f"{name}.weight", prefix=None).removesuffix(".weight")
        return names.merged_module(name), spelled

    def format_of(name: str) -> WeightFormat | None:
        form = weights.of(name, *([theirs[name]] if name in theirs else names_there(name)))
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
    """Raise ``ConfigError`` if a weight is the lower half of a tensor, and a scale's block may
    reach into it from the upper half, which the number of scales cannot tell."""
    rows = form.block[0]
    begins = [part.start for part in stored.region if isinstance(part, slice)]
    for begin in begins if rows else ():
        of_halves, of_all = 2 * -(-begin // rows), -(-2 * begin // rows)
        if begin % rows and of_halves == of_all:
            raise ConfigError(
                f"{stored.name}: blocks of {rows} rows may lie across row {begin}, which parts "
                "gates and ups"
            )


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters ``dtype``, unless they are token ids; a matrix itself decides which of
    its parameters get it."""
    if isinstance(module, DraftedTokens):
        return
    if isinstance(module, (Matrix, StoredWeight, Router, HyperConnection)):
        module.cast(dtype)
        return
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)
    for child in module.children():
        _cast(child, dtype)


def _allocate(model: Decoder, device: torch.device) -> None:
    """Give the parameters memory on ``device``, with nothing in it yet.

    ``nn.Module.to_empty`` would do the same, but its first call imports sympy, for half a second.
    """
    for module in model.modules():
        for name, planned in list(module.named_parameters(recurse=False)):
            empty = torch.empty(planned.shape, dtype=planned.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))


def _lay_out(model: Decoder, device: torch.device) -> None:
    """Arrange the memory as kernels want it, and fill what no checkpoint holds."""
    for module in model.modules():
        if isinstance(module, (MergedColumnLinear, RowLinear)):
            module.matrix.lay_out(device)
        elif isinstance(module, DraftedTokens) or (
            isinstance(module, (HeadNorm, RMSNorm)) and not module.weighted
        ):
            module.reset()
    # after the linear layers: those of a shared expert may move into the memory of the others
    for module in model.modules():
        if isinstance(module, ExpertsMLP):
            module.lay_out()
