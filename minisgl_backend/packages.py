"""Commands that install optional packages, for messages to the operator.

The versions are those of the extra ``gpu`` in pyproject.toml.
"""

from __future__ import annotations

from typing import Final

FLASH_ATTN: Final = "pip install sglang-kernel==0.4.4"
FLASH_INFER: Final = "pip install flashinfer-python==0.6.12"
