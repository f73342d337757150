"""What figures of an engine depend on: model, options, device and versions.

Looks things up, measures nothing. What a machine does not tell is left out.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any, Final

from minisgl_backend.cli.serve import options_as_text
from minisgl_backend.config import EngineOptions
from minisgl_backend.runtime.engine import EngineInfo

_PACKAGES: Final = {
    "minisgl": "minisgl-triton",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "sgl_kernel": "sglang-kernel",
    "cuda_bindings": "cuda-bindings",
    "numpy": "numpy",
}
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def engine_facts(info: EngineInfo, options: EngineOptions) -> dict[str, Any]:
    """By name, for the ``info`` of a report. To be called while the engine runs."""
    import torch

    given = {**options_as_text(options), "model": Path(info.model).name}
    facts: dict[str, Any] = {
        "architecture": info.architecture,
        "dtype": info.dtype,
        "attention": info.attention_backend,
        "page_size": info.page_size,
        "pages": info.num_pages,
        "options": " ".join(f"{name}={value}" for name, value in given.items()),
        "torch": torch.__version__,
    }
    for name, distribution in _PACKAGES.items():
        try:
            facts[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if info.device.startswith("cuda"):
        facts |= _gpu_facts(options.tensor_parallel_size)
    if options.tensor_parallel_size > 1:
        facts["ranks"] = options.tensor_parallel_size
    return facts


def _gpu_facts(num_gpus: int) -> dict[str, Any]:
    """Of the GPUs of all ranks; the memory that is taken on each, by this engine or by others."""
    import torch

    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    if _DRIVER.exists() and (found := re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _DRIVER.read_text())):
        facts["driver"] = found.group()
    if num_gpus > 1:
        facts["gpus"] = ", ".join(map(torch.cuda.get_device_name, range(num_gpus)))
        nccl: Any = torch.cuda.nccl
        facts["nccl"] = ".".join(map(str, nccl.version()))
    try:
        taken = [torch.cuda.device_memory_used(index) / 2**30 for index in range(num_gpus)]
    except (ModuleNotFoundError, RuntimeError):  # needs NVIDIA's management library
        return facts
    return {**facts, "gpu_memory_gib": ", ".join(f"{gib:.1f}" for gib in taken)}
