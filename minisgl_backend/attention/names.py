"""The names of attention backends on a GPU, as the option ``attention_backend`` has them.

Must not import torch, so that a wrong name is refused before anything starts, nor know what a
backend can do (``choose``).
"""

from __future__ import annotations

from typing import Final

from minisgl_backend.config import did_you_mean
from minisgl_backend.errors import ConfigError

PREFILL_NAMES: Final = ("triton", "fa", "fi", "sdpa")
DECODE_NAMES: Final = ("cuda", "triton", "fa", "fi", "trtllm", "sdpa")
"""All names: what computes prompts can decode."""


def parse_names(option: str) -> tuple[str | None, str]:
    """The names for prefill, None for that of ``auto``, and for decode. Raises ``ConfigError``."""
    parts = [part.strip() for part in option.split(",")]
    for part in parts:
        if part not in DECODE_NAMES:
            raise ConfigError(
                f"attention_backend {part!r} is not offered on a GPU; offered are "
                f"{', '.join(DECODE_NAMES)} and two of them as prefill,decode"
                + did_you_mean(part, DECODE_NAMES)
            )
    if len(parts) > 2:
        raise ConfigError(f"attention_backend takes one or two names, got {option!r}")
    prefill, decode = parts[0], parts[-1]
    if prefill in PREFILL_NAMES:
        return prefill, decode
    if len(parts) == 1:
        return None, decode
    raise ConfigError(
        f"attention_backend {prefill} only decodes: use {prefill} alone, or put one of "
        f"{', '.join(PREFILL_NAMES)} before the comma"
    )
