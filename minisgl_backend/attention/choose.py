"""Turns the option ``attention_backend`` into a backend. A CPU has only ``sdpa``.

One name stands for both prefill and decode; two names, with a comma, for prefill and for decode.
Names that are unknown or cannot run here raise a ``ConfigError`` that says what to do. ``cuda`` and
``trtllm`` only decode: given alone, each is paired with the prefill that ``auto`` takes. Must not
know models, plans or requests: what it needs of them is in ``AttentionSetting``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Final, Generic, TypeVar

import torch

from minisgl_backend import packages
from minisgl_backend.attention import flash_infer
from minisgl_backend.attention.base import (
    AttentionSetting,
    ChunkExpansion,
    DecodeAttention,
    GroupedDecode,
    IndexShape,
    PagedAttention,
    PrefillAttention,
    ScheduledDecode,
)
from minisgl_backend.attention.by_layer import AttentionByLayer, GroupedByLayer, ScheduledByLayer
from minisgl_backend.attention.by_rows import DecodeByRows
from minisgl_backend.attention.expanded import (
    HEADS_OF_FLASH_ATTN,
    ExpandedPrefill,
    FlashRagged,
)
from minisgl_backend.attention.flash_attn import FlashAttention
from minisgl_backend.attention.flash_infer import (
    TRTLLM_PAGE_SIZES,
    FlashInferDecode,
    FlashInferPrefill,
    TrtllmDecode,
)
from minisgl_backend.attention.latent_kernels import LatentDecode, LatentPrefill
from minisgl_backend.attention.names import parse_names
from minisgl_backend.attention.own_kernels import (
    CudaDecode,
    InvariantAttention,
    TritonDecode,
    TritonPrefill,
    decode_shape,
)
from minisgl_backend.attention.sdpa import SdpaAttention
from minisgl_backend.attention.sections import (
    ScheduledSectionDecode,
    SectionDecode,
    SectionPrefill,
    within_section,
)
from minisgl_backend.attention.sparse import SparseAttention
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.dispatch import has_triton, num_processors
from minisgl_backend.kernels.indexer import ChooseSlots, choose_slots
from minisgl_backend.kernels.ragged_attention import ragged_attention_reference

logger = logging.getLogger(__name__)

_MOST_HEAD_DIM: Final = 512
"""The largest heads that Triton's kernels take; ``sdpa`` also takes larger ones."""
_MOST_HEAD_BYTES_OF_AUTO: Final = 1024
"""The largest heads that auto gives to Triton's kernels: not all GPUs have enough shared memory for
larger ones."""
_MOST_HEAD_DIM_OF_GROUPS: Final = 128
"""The largest heads with which a GPU reads shared pages once for all rows of a group."""

_LATENTS_OF_FLASH_ATTN: Final = ((64, 256), (64, 512))
"""Sizes of rotated keys and latents that ``fa`` takes."""

_FEW_ROWS_OVER_LATENTS: Final = 4
"""Up to this many rows ``triton`` decodes faster than ``fa``: measured on an H200 with the 20 heads
of GLM-4.7-Flash."""

_READ_AGAIN_BYTES: Final = 200_000_000
"""Keys and values of a layer. Decoding rows that have the same pages read as many again, mostly
from the L2 cache, in about the time that chunks take longer: measured on an H200 with Qwen3-14B and
Qwen3-0.6B, and ``fa``. The chunks of other backends take longer the longer the context is."""

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[T_co]):
    """One implementation: how to make it, why it cannot run (None if it can), and whether it needs
    lengths on the host, so that no step with it is captured."""

    make: Callable[[AttentionSetting], T_co]
    why_not: Callable[[AttentionSetting], str | None]
    needs_host: bool = False


def choose_attention(option: str | None, setting: AttentionSetting) -> PagedAttention:
    """The backend that ``option`` names; by default the fastest measured one that can run here.

    For decode that is ``cuda`` on Hopper and later, otherwise ``triton``. On an H200 each is faster
    than ``fa`` and ``fi``, and nothing is planned on the host. For prefill it is ``fa`` on Hopper
    with 16-bit pages if sgl_kernel is installed, since its kernels use the tensor cores better, and
    otherwise ``triton``. ``fi`` and ``trtllm`` compile their kernels for minutes at first use, so
    ``auto`` never takes them. With ``batch_invariant`` there is one backend, which no option names.
    Only ``triton``, ``fa`` and ``sdpa`` take latents; by default ``triton`` decodes few rows, and
    ``fa`` more. Only ``triton`` and ``sdpa`` take bounded scores.
    """
    if setting.shape.index is not None:
        return _sparse(option, setting, setting.shape.index)
    if len(setting.shape.kinds) > 1 or setting.shape.window_pages:
        return _by_layer(option, setting)
    if setting.shape.sections:
        return _in_sections(option, setting)
    if setting.device.type != "cpu" and setting.shape.head_dim > _MOST_HEAD_DIM_OF_GROUPS:
        setting = replace(setting, grouped=False)
    if setting.batch_invariant:
        attention = InvariantAttention(setting)
        return PagedAttention("invariant", attention, attention)
    prefill_name, decode_name = _names(option, setting)
    of_prefill, of_decode = _PREFILL[prefill_name], _DECODE[decode_name]
    prefill = _made(of_prefill, prefill_name, setting)
    decode = _made(of_decode, decode_name, setting)
    name = prefill_name if prefill_name == decode_name else f"{prefill_name},{decode_name}"
    if option is None and setting.shape.latent_dim is not None and prefill_name == "fa":
        decode = DecodeByRows(decode, _flash_attn(setting), _FEW_ROWS_OVER_LATENTS)
        name = f"{name}+fa"
    can_capture = not of_decode.needs_host
    # the schedule of a captured step is only for decoding rows
    has_schedule = isinstance(decode, ScheduledDecode)
    captures_chunks = can_capture and not of_prefill.needs_host and not has_schedule
    # on a CPU there is one backend, which does; with float16 engines hung in tests on a GPU
    can_group = setting.device.type == "cpu" or (
        isinstance(decode, GroupedDecode) and setting.dtype == torch.bfloat16
    )
    return PagedAttention(
        name,
        prefill,
        decode,
        can_capture,
        captures_chunks,
        reads_groups=setting.grouped and can_group,
        expansion=_expansion(prefill_name if option else "fa", setting),
        most_read_again=_most_read_again(setting) if prefill_name == "fa" else None,
    )


def _most_read_again(setting: AttentionSetting) -> int:
    """``PagedAttention.most_read_again`` with ``fa``."""
    shape = setting.shape
    numbers = shape.tensors_per_layer * shape.num_kv_heads * shape.head_dim  # of a position
    return _READ_AGAIN_BYTES // (numbers * setting.kv_dtype.itemsize)


def _by_layer(option: str | None, setting: AttentionSetting) -> PagedAttention:
    """A backend for layers whose heads or pages differ, or that all have window pages. It is made
    of a backend for each kind of layer, which gets the table of that kind's pages."""
    kinds = setting.shape.kinds
    backends = [
        choose_attention(
            option,
            replace(
                setting,
                shape=replace(kind, window_pages=False),
                # rows of a group may see different parts of the windows of others
                grouped=setting.grouped and not kind.window_pages,
            ),
        )
        for kind, _ in kinds
    ]
    has_schedule = any(isinstance(backend.decode, ScheduledDecode) for backend in backends)
    if has_schedule and setting.shape.by_layer:
        raise ConfigError(
            f"attention_backend {backends[0].name} is not offered for models whose layers differ "
            "in their heads"
        )
    places = {
        layer: (kind, own_index)
        for kind, (_, layers) in enumerate(kinds)
        for own_index, layer in enumerate(layers)
    }
    grouped = [isinstance(backend.decode, GroupedDecode) for backend in backends]
    in_pages = [not kind.window_pages for kind, _ in kinds]
    make = AttentionByLayer
    if has_schedule:
        make = ScheduledByLayer
    elif sum(in_pages) == 1 and grouped[in_pages.index(True)]:
        make = GroupedByLayer
    both = make(
        backends,
        [places[layer] for layer in sorted(places)],
        [kind.window_pages for kind, _ in kinds],
    )
    return PagedAttention(
        "+".join(dict.fromkeys(backend.name for backend in backends)),
        both,
        both,
        can_capture=all(backend.can_capture for backend in backends),
        captures_chunks=all(backend.captures_chunks for backend in backends),
        reads_groups=any(backend.reads_groups for backend in backends),
        most_read_again=min(
            (
                backend.most_read_again
                for backend, sees_all in zip(backends, in_pages, strict=True)
                if sees_all and backend.most_read_again is not None
            ),
            default=None,
        ),
    )


def _sparse(option: str | None, setting: AttentionSetting, index: IndexShape) -> PagedAttention:
    """A backend for layers that choose positions, made of one that attends to all, and of one whose
    pages have one position."""
    setting = replace(setting, shape=replace(setting.shape, index=None), grouped=False)
    of_all = choose_attention(option, setting)
    # more tokens than this are not split over multiprocessors
    most_tokens = max(setting.max_batch_size, num_processors(setting.device))
    chosen = choose_attention(
        option,
        replace(
            setting,
            shape=replace(setting.shape, expanded=None),  # it only decodes
            page_size=1,
            max_sequence_length=index.top_k,
            max_batch_size=most_tokens,
        ),
    )
    return SparseAttention(
        of_all.name,
        of_all.prefill,
        of_all.decode,
        of_all.can_capture,
        of_all.captures_chunks,
        expansion=of_all.expansion,
        longest_expanded=index.top_k,
        choose_slots=_choice(setting, index.top_k),
        chosen=chosen.decode,
        top_k=index.top_k,
        page_size=setting.page_size,
    )


def _choice(setting: AttentionSetting, top_k: int) -> ChooseSlots:
    """What picks the positions with the highest scores."""
    if _why_not_gpu(setting, (9,)) or _why_not_import("cuda.bindings", packages.CUDA_BINDINGS):
        return choose_slots
    from minisgl_backend.kernels.cuda.position_choice import MOST_CHOSEN, PositionChoice

    return PositionChoice(setting.device) if top_k <= MOST_CHOSEN else choose_slots


def _in_sections(option: str | None, setting: AttentionSetting) -> PagedAttention:
    """A backend for layers whose windows are sections, made of one that attends within them."""
    inner, size = choose_attention(option, within_section(setting)), setting.shape.section
    assert size is not None
    make = ScheduledSectionDecode if isinstance(inner.decode, ScheduledDecode) else SectionDecode
    return replace(
        inner,
        prefill=SectionPrefill(inner.prefill, size, setting.page_size),
        decode=make(inner.decode, size, setting.page_size),
    )


def _names(option: str | None, setting: AttentionSetting) -> tuple[str, str]:
    """The names for prefill and for decode."""
    if option is None:
        return _auto(setting)
    prefill, decode = parse_names(option)
    return prefill or _auto(setting)[0], decode


def _auto(setting: AttentionSetting) -> tuple[str, str]:
    """The names for prefill and for decode."""
    head_bytes = _tile_dim(setting) * setting.dtype.itemsize
    if setting.device.type == "cpu" or head_bytes > _MOST_HEAD_BYTES_OF_AUTO:
        return "sdpa", "sdpa"
    return (
        "fa" if _why_not_flash_attn(setting) is None else "triton",
        "cuda" if _why_not_cuda(setting) is None else "triton",
    )


def _made(kind: _Kind[T_co], name: str, setting: AttentionSetting) -> T_co:
    reason = kind.why_not(setting)
    if reason is not None:
        raise ConfigError(f"attention_backend {name} {reason}")
    return kind.make(setting)


def _why_not_triton(setting: AttentionSetting) -> str | None:
    if (head_dim := _tile_dim(setting)) > _MOST_HEAD_DIM:
        what = "heads" if setting.shape.latent_dim is None else "latents"
        return f"needs {what} of at most {_MOST_HEAD_DIM} elements, not {head_dim}: take sdpa"
    return None if has_triton() else "needs Triton: pip install triton"


def _tile_dim(setting: AttentionSetting) -> int:
    """The width of the tiles of Triton's kernels: beside a latent they have another of its rotated
    key."""
    return setting.shape.latent_dim or setting.shape.head_dim


def _why_unbounded(setting: AttentionSetting) -> str | None:
    if not setting.shape.cap:
        return None
    return "has no kernels for the bounded scores of this model: take triton or sdpa"


def _why_no_latents(setting: AttentionSetting) -> str | None:
    if setting.shape.latent_dim is None:
        return None
    return "has no kernels for the latents of this model: take fa, triton or sdpa"


def _expansion(prefill: str, setting: AttentionSetting) -> ChunkExpansion | None:
    """How chunks read latents expanded, if the backend ``prefill`` has kernels for that. It may be
    ``fa`` even if pages are of float8, since expanded keys and values are not."""
    if (heads := setting.shape.expanded) is None:
        return None
    if setting.device.type == "cpu":
        return ExpandedPrefill(setting, ragged_attention_reference)
    # neither pages nor sinks reach the kernel
    alone = replace(setting, kv_dtype=setting.dtype, shape=replace(setting.shape, sinks=False))
    can_run = _why_not_flash_attn(alone) is None
    is_known = (heads.key_dim, heads.value_dim) in HEADS_OF_FLASH_ATTN
    if prefill != "fa" or not (can_run and is_known):
        return None
    return ExpandedPrefill(setting, FlashRagged(_library_of_flash_attn()))


def _why_not_cuda(setting: AttentionSetting) -> str | None:
    if reason := _why_no_latents(setting) or _why_unbounded(setting):
        return reason
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return f"needs dtype bfloat16 or float16, not {_name(setting.dtype)}"
    reason = (
        _why_not_gpu(setting, (9, 10, 12))
        or _why_not_import("cuda.bindings", packages.CUDA_BINDINGS)
        or _why_not_triton(setting)
    )
    if reason is not None:
        return reason
    from minisgl_backend.kernels.cuda.decode_attention import why_not

    return why_not(decode_shape(setting), setting.device)


def _why_not_flash_attn(setting: AttentionSetting) -> str | None:
    if reason := _why_unbounded(setting):
        return reason
    if setting.kv_dtype not in (torch.bfloat16, torch.float16):
        return f"needs KV pages of bfloat16 or float16, not {_name(setting.kv_dtype)}"
    if setting.shape.sinks and setting.shape.latent_dim is not None:
        return "has no kernels for attention sinks beside latents: take triton or sdpa"
    if setting.shape.sinks and setting.dtype != torch.bfloat16:
        return f"needs dtype bfloat16 for attention sinks, not {_name(setting.dtype)}"
    head_dim, latent_dim = setting.shape.head_dim, setting.shape.latent_dim
    if latent_dim is not None:
        if (head_dim - latent_dim, latent_dim) not in _LATENTS_OF_FLASH_ATTN:
            return "has no kernels for latents of this size: take triton or sdpa"
    elif head_dim > 256 or head_dim & (head_dim - 1):
        # sgl_kernel ends the process with heads of 96 elements
        return f"needs a head_dim that is a power of two up to 256, not {head_dim}"
    return _why_not_gpu(setting, (9,)) or _why_not_import(
        "sgl_kernel.flash_attn", packages.FLASH_ATTN
    )


def _why_not_flash_infer(setting: AttentionSetting) -> str | None:
    """The limits that all of FlashInfer's kernels share."""
    if reason := _why_no_latents(setting) or _why_unbounded(setting):
        return reason
    head_dim = setting.shape.head_dim
    if setting.dtype not in (torch.bfloat16, torch.float16):
        return f"needs dtype bfloat16 or float16, not {_name(setting.dtype)}"
    if head_dim not in flash_infer.HEAD_DIMS:
        return f"needs a head_dim of {_listed(flash_infer.HEAD_DIMS)}, not {head_dim}"
    return (
        _why_not_gpu(setting, (8, 9, 10, 12))
        or _why_not_import("flashinfer", packages.FLASH_INFER)
        or flash_infer.why_no_kernels()
    )


def _why_not_trtllm(setting: AttentionSetting) -> str | None:
    if reason := _why_no_latents(setting) or _why_unbounded(setting):
        return reason
    if setting.page_size not in TRTLLM_PAGE_SIZES:
        return (
            f"needs a page_size of {_listed(TRTLLM_PAGE_SIZES)}, not {setting.page_size}: "
            f"set page_size={TRTLLM_PAGE_SIZES[0]}, or take another backend"
        )
    return _why_not_gpu(setting, (9, 10, 12)) or _why_not_flash_infer(setting)


def _why_not_gpu(setting: AttentionSetting, majors: tuple[int, ...]) -> str | None:
    if setting.device.type != "cuda":
        return "needs a GPU"
    major = torch.cuda.get_device_capability(setting.device)[0]
    if major not in majors:
        return f"needs a GPU of compute capability {_listed(majors)}, this one has {major}"
    return None


def _why_not_import(module: str, command: str) -> str | None:
    error = packages.import_error(module)
    return None if error is None else f"needs {module.partition('.')[0]} ({error}): {command}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(numbers: tuple[int, ...]) -> str:
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _library_of_flash_attn() -> ModuleType:
    return importlib.import_module("sgl_kernel.flash_attn")


def _flash_attn(setting: AttentionSetting) -> FlashAttention:
    return FlashAttention(_library_of_flash_attn(), setting)


def _triton_prefill(setting: AttentionSetting) -> PrefillAttention:
    has_latents = setting.shape.latent_dim is not None
    return LatentPrefill(setting.shape) if has_latents else TritonPrefill(setting.shape)


def _triton_decode(setting: AttentionSetting) -> DecodeAttention:
    make = TritonDecode if setting.shape.latent_dim is None else LatentDecode
    return make(setting.shape, max_batch_size=setting.max_batch_size, device=setting.device)


def _flash_infer() -> ModuleType:
    logger.info("FlashInfer compiles kernels at their first use, which can take minutes")
    return importlib.import_module("flashinfer")


_PREFILL: Final[Mapping[str, _Kind[PrefillAttention]]] = MappingProxyType(
    {
        "triton": _Kind(_triton_prefill, _why_not_triton),
        "fa": _Kind(_flash_attn, _why_not_flash_attn),
        "fi": _Kind(
            lambda setting: FlashInferPrefill(_flash_infer(), setting),
            _why_not_flash_infer,
            needs_host=True,
        ),
        "sdpa": _Kind(SdpaAttention, lambda setting: None, needs_host=True),
    }
)
_DECODE: Final[Mapping[str, _Kind[DecodeAttention]]] = MappingProxyType(
    {
        "cuda": _Kind(CudaDecode, _why_not_cuda),
        "triton": _Kind(_triton_decode, _why_not_triton),
        "fa": _Kind(_flash_attn, _why_not_flash_attn),
        "fi": _Kind(
            lambda setting: FlashInferDecode(_flash_infer(), setting), _why_not_flash_infer
        ),
        "trtllm": _Kind(lambda setting: TrtllmDecode(_flash_infer(), setting), _why_not_trtllm),
        "sdpa": _Kind(SdpaAttention, lambda setting: None, needs_host=True),
    }
)
