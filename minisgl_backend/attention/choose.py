"""From the option ``attention_backend`` to a backend of a GPU.

A name stands for prefill and decode both; two names joined by a comma for one each. What is unknown
or not installed is refused by a ``ConfigError`` that says what to do.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from minisgl_backend.attention.base import AttentionShape
from minisgl_backend.attention.flash_attn import FlashAttention
from minisgl_backend.attention.paged import DecodeAttention, PagedAttention, PrefillAttention
from minisgl_backend.attention.triton import TritonDecode, TritonPrefill
from minisgl_backend.config import did_you_mean
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.dispatch import has_triton

NAMES = ("triton", "fa")
_FA_COMMAND = "pip install sglang-kernel==0.4.4"


def choose_attention(
    option: str | None,
    shape: AttentionShape,
    *,
    page_size: int,
    kv_dtype: torch.dtype,
    max_batch_size: int,
    device: torch.device,
) -> PagedAttention:
    """The backend that ``option`` names; by default the fastest one measured that is there.

    On an H200 that is ``triton`` for decode. For prefill it is ``fa`` where it can run, since its
    kernels use the tensor cores of Hopper better.
    """
    if option is None:
        can_flash = _why_not_flash(kv_dtype, device) is None
        names = ("fa" if can_flash else "triton", "triton")
    else:
        names = _parse(option)

    def make(name: str) -> FlashAttention | None:
        if name == "triton":
            if not has_triton():
                raise ConfigError("attention_backend triton needs Triton: pip install triton")
            return None
        reason = _why_not_flash(kv_dtype, device)
        if reason is not None:
            raise ConfigError(f"attention_backend fa {reason}")
        return FlashAttention(_flash_library(), shape, page_size=page_size)

    prefill: PrefillAttention = make(names[0]) or TritonPrefill(shape)
    decode: DecodeAttention = make(names[1]) or TritonDecode(
        shape, max_batch_size=max_batch_size, device=device
    )
    name = names[0] if names[0] == names[1] else ",".join(names)
    return PagedAttention(name, prefill, decode)


def _parse(option: str) -> tuple[str, str]:
    """The names for prefill and for decode."""
    parts = [part.strip() for part in option.split(",")]
    for part in parts:
        if part not in NAMES:
            raise ConfigError(
                f"attention_backend {part!r} is not offered on a GPU; offered are "
                f"{', '.join(NAMES)} and two of them as prefill,decode{did_you_mean(part, NAMES)}"
            )
    if len(parts) > 2:
        raise ConfigError(f"attention_backend takes one or two names, got {option!r}")
    return parts[0], parts[-1]


def _why_not_flash(kv_dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashAttention-3 cannot run here; None where it can."""
    if kv_dtype not in (torch.bfloat16, torch.float16):
        return f"needs KV pages of bfloat16 or float16, not {str(kv_dtype).removeprefix('torch.')}"
    if device.type != "cuda":
        return "needs a GPU"
    major = torch.cuda.get_device_capability(device)[0]
    if major != 9:
        return f"needs a GPU of compute capability 9, this one has {major}"
    try:
        _flash_library()
    except ImportError as error:
        return f"needs sgl_kernel ({error}): {_FA_COMMAND}"
    return None


def _flash_library() -> ModuleType:
    return importlib.import_module("sgl_kernel.flash_attn")
