"""Which steps are captured in CUDA graphs: decode steps by their number of rows, and steps with
prompts by their number of tokens.

Knows options, the size of a layer, and whether an attention backend can be captured. Must not know
what a graph contains, nor import torch: options are checked before anything starts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import ConfigError

if TYPE_CHECKING:  # it brings torch
    from minisgl_backend.attention.base import PagedAttention

logger = logging.getLogger(__name__)

_CAPTURED_ROWS: Final = 256
_CAPTURED_TOKENS: Final = 1024
_CAPTURED_MULTIPLICATIONS: Final = 2 * 10**11
"""Unless options say otherwise, decode steps are captured up to this many rows and steps with
prompts up to this many tokens or, if that allows more, up to this many multiplications of a GPU
(tokens times weights) in a layer: in a larger step a layer takes the GPU longer than the host needs
to launch its kernels (about a millisecond)."""


def most_decode_rows(options: EngineOptions) -> int:
    """The most rows of a decode step. A guess counts as one, too (``execution.checks``)."""
    return max(options.max_running_requests, options.most_checks + options.most_guesses)


def max_captured_batch_size(options: EngineOptions, weights_per_layer: int) -> int:
    """The largest decode step to capture on a GPU; for ``weights_per_layer`` see ``Resolved``."""
    most = options.cuda_graph_max_batch_size
    if most is None:
        most = max(_CAPTURED_ROWS, _CAPTURED_MULTIPLICATIONS // weights_per_layer)
    return min(most, most_decode_rows(options))


def check_graph_options(options: EngineOptions) -> None:
    """Raise ``ConfigError`` if an option asks for graphs that no model and no backend allows."""
    largest, most_tokens = options.cuda_graph_max_batch_size, options.cuda_graph_max_tokens
    if most_tokens and largest == 0:
        raise ConfigError(
            f"cuda_graph_max_tokens={most_tokens} does not go with cuda_graph_max_batch_size=0, "
            "which turns all CUDA graphs off"
        )
    most = most_decode_rows(options)
    batch_sizes(most if largest is None else min(most, largest), options.cuda_graph_batch_sizes)


def graph_sizes(
    options: EngineOptions,
    attention: PagedAttention,
    *,
    max_batch_size: int,
    weights_per_layer: int,
) -> tuple[list[int], list[int]]:
    """What to capture: decode steps by number of rows, steps with prompts by number of tokens.

    For ``weights_per_layer`` see ``Resolved``. Raises ``ConfigError`` if an option asks for graphs
    that are impossible with this backend or model; see ``check_graph_options`` for others.
    """
    most_tokens = options.cuda_graph_max_tokens
    if not attention.can_capture:
        if options.cuda_graph_max_batch_size or options.cuda_graph_batch_sizes or most_tokens:
            raise ConfigError(
                f"attention_backend {attention.name} cannot be captured in CUDA graphs: leave out "
                "cuda_graph_max_batch_size, cuda_graph_batch_sizes and cuda_graph_max_tokens, or "
                "take another backend"
            )
        logger.warning("attention_backend %s runs without CUDA graphs", attention.name)
        return [], []
    decode_sizes = batch_sizes(max_batch_size, options.cuda_graph_batch_sizes)
    if most_tokens and not attention.captures_chunks:
        raise ConfigError(
            f"attention_backend {attention.name} cannot be captured in steps with prompts: leave "
            "out cuda_graph_max_tokens, or take another backend"
        )
    if not decode_sizes or not attention.captures_chunks:
        return decode_sizes, []
    if most_tokens is None:
        most_tokens = max(_CAPTURED_TOKENS, _CAPTURED_MULTIPLICATIONS // weights_per_layer)
    whole_step = options.max_prefill_tokens + options.max_running_requests
    return decode_sizes, token_counts(whole_step, most_tokens)


def batch_sizes(most: int, chosen: str | None) -> list[int]:
    """Sizes to capture, ascending: 1, 2, 4, then every eighth up to 256, then 16 per doubling, and
    ``most``, the largest; or those ``chosen``.

    ``chosen`` is the option cuda_graph_batch_sizes. Raises ``ConfigError`` if it is malformed, or
    if it is given although there are to be no graphs.
    """
    if most == 0:
        if chosen is not None:
            raise ConfigError(
                f"cuda_graph_batch_sizes={chosen} does not go with cuda_graph_max_batch_size=0, "
                "which turns all CUDA graphs off"
            )
        return []
    if chosen is None:
        sizes, base = [1, 2, 4, *range(8, 256, 8)], 256
        while base < most:
            sizes += range(base, 2 * base, base // 16)
            base *= 2
        return [size for size in sizes if size < most] + [most]
    try:
        sizes = sorted({int(word) for word in chosen.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] > most:
        raise ConfigError(
            f"cuda_graph_batch_sizes must be numbers of 1..{most} as 1,2,4, got {chosen!r}"
        )
    return sizes


def token_counts(whole_step: int, most: int) -> list[int]:
    """Sizes to capture, ascending: 16, 32, 64, then four per doubling, and the largest.

    The largest is the smaller of ``most`` and ``whole_step``; if that is 0, there are no sizes.
    """
    largest = min(whole_step, most)
    if largest == 0:
        return []
    sizes, base = [16, 32, 64], 128
    while base < largest:
        sizes += [base, base * 5 // 4, base * 6 // 4, base * 7 // 4]
        base *= 2
    return [size for size in sizes if size < largest] + [largest]
