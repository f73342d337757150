"""``python -m tests.gpu.flash_infer_modules``: compile all FlashInfer modules that the suite uses,
in parallel.

Otherwise each module is compiled when a test first needs it, one after another.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.attention.flash_infer import TENSOR_CORE_GROUP
from tests.gpu.paged import FP8, Case
from tests.gpu.test_attention_backends import BACKENDS


def modules() -> dict[str, Any]:
    """What flashinfer.jit builds, by name."""
    found = [spec for case in BACKENDS["fi"] for spec in of_flash_infer(case)]
    found += [of_xqa(case) for case in BACKENDS["trtllm"]]
    return {spec.name: spec for spec in found}


def of_flash_infer(case: Case) -> list[Any]:
    """Modules for prompts and for decoding: on tensor cores, with FlashAttention-2's kernels."""
    attention = importlib.import_module("flashinfer.jit.attention")
    query, kv = torch.bfloat16, FP8 if case.fp8 else torch.bfloat16
    dtypes, dims = (query, kv, query, torch.int32), (case.head_dim, case.head_dim)
    no_position, has_window, no_cap = 0, case.window is not None, False

    def prefill(backend: str) -> Any:
        return attention.gen_batch_prefill_module(
            backend, *dtypes, *dims, no_position, has_window, no_cap, False
        )

    prompts = prefill("fa2" if case.fp8 else "fa3")
    if case.group >= TENSOR_CORE_GROUP:
        return [prompts, prefill("fa2")]
    return [
        prompts,
        attention.gen_batch_decode_module(*dtypes, *dims, no_position, has_window, no_cap),
    ]


def of_xqa(case: Case) -> Any:
    query, kv = torch.bfloat16, FP8 if case.fp8 else torch.bfloat16
    return importlib.import_module("flashinfer.jit.xqa").gen_xqa_module(
        query,
        kv,
        case.page_size,
        case.head_dim,
        case.group,
        case.window is not None,
        query,
    )


def main() -> None:
    setting = BACKENDS["fi"][0].setting(torch.bfloat16, torch.device("cuda"))
    choose_attention("fi", setting)  # reports what is missing
    specs = modules()
    print(f"{len(specs)} modules of FlashInfer", flush=True)
    importlib.import_module("flashinfer.jit.core").build_jit_specs(list(specs.values()))


if __name__ == "__main__":
    main()
