"""Commands that install optional packages of which one version fits, for messages to the operator.

The versions are those of the extra ``gpu`` in pyproject.toml, and of CUDA in its PyTorch.
"""

from __future__ import annotations

from typing import Final

FLASH_ATTN: Final = "pip install sglang-kernel==0.4.4"
FLASH_INFER: Final = "pip install flashinfer-python==0.6.12"
FLASH_INFER_KERNELS: Final = (
    "pip install flashinfer-jit-cache==0.6.12 --index-url https://flashinfer.ai/whl/cu130"
)
"""Compiled ahead; of the same version as FlashInfer, and from its authors' index alone."""
CUDA_BINDINGS: Final = "pip install cuda-bindings"
"""Of the major version of PyTorch's CUDA."""
