"""All-reduce, residual add and RMSNorm in one kernel, by FlashInfer (TensorRT-LLM's one-shot form).

Each rank writes its part into the memory of every rank and sums up the parts in its own. There is
no flag beside the data: memory that waits for data holds -0.0, which is never sent ("Lamport"). Of
three buffers one is in use, one may still be read by a slower rank and one is being cleared. A rank
sends more the more ranks there are, so this is for messages of a few MB: for decode steps.

The kernels can be captured like any other: the index of the buffer in use is kept on the GPU. A
kernel that waits for a lost rank does not end by itself; ``let_go`` ends it.
"""

from __future__ import annotations

import importlib.util
import logging
import time
import warnings
from typing import Any, Final

import torch
from torch import Tensor

from minisgl_backend import packages
from minisgl_backend.errors import ConfigError
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.leaving import Leaving
from minisgl_backend.parallel.peer_memory import PeerMemory

logger = logging.getLogger(__name__)

_SIZES: Final = (2, 4, 8)
_DTYPES: Final = (torch.bfloat16, torch.float16)
_LEAST_HIDDEN_SIZE: Final = 256
_MOST_SENT: Final = 8 * 2**20
"""Bytes that a rank sends; beyond that NCCL's rings, which send less, are faster."""

_ALIGNMENT: Final = 128
"""Bytes of which buffers are multiples; the kernel loads and stores 16 at once."""

_EMPTY: Final = 0x8000
"""The bits of -0.0 in both dtypes."""
_NUM_BUFFERS: Final = 3
_ALL_REDUCE_ADD_NORM: Final = 1
"""``kARResidualRMSNorm`` of FlashInfer's AllReduceFusionPattern."""
_LET_GO_S: Final = 10.0


class FlashInferSum:
    """The kernel and its memory. Every rank of a host makes one at the same time."""

    def __init__(self, host: Group, device: torch.device):
        """``host`` is a group of the same ranks for tensors in main memory.

        Raises ``ConfigError`` if FlashInfer is missing or has no kernel for this number of ranks.
        """
        if host.size not in _SIZES:
            raise ConfigError(f"comm=flashinfer needs 2, 4 or 8 ranks, there are {host.size}")
        self._kernels = _load_kernels()
        self._rank, self._size = host.rank, host.size
        self._letting_go = Leaving(self._let_go)
        self._most_bytes = most_bytes(host.size)
        buffer_bytes = host.size * self._most_bytes
        with torch.cuda.device(device):
            self._memory = PeerMemory(host, _NUM_BUFFERS * buffer_bytes, _EMPTY)
            # blocks that have begun, flag of another form, buffer in use, its size, words to clear
            self._state = torch.tensor([0, 0, 0, buffer_bytes, 0], dtype=torch.int32, device=device)
            # the first two thirds are the memory of another form, which is not used
            pointers = [*(self._memory.addresses * 3), self._state.data_ptr()]
            self._workspace = torch.tensor(pointers, dtype=torch.int64, device=device)
            self._beside = torch.cuda.Stream(device)
            self._stream = torch.cuda.current_stream(device)
            torch.cuda.synchronize(device)

    def fits(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> bool:
        """Whether there is a kernel for such tensors, and it beats separate ones."""
        num_bytes = num_tokens * hidden_size * dtype.itemsize
        return (
            dtype in _DTYPES
            and hidden_size >= _LEAST_HIDDEN_SIZE
            and hidden_size % 8 == 0
            and 0 < num_bytes <= self._most_bytes
        )

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
    ) -> Tensor:
        """residual += the sum of all ranks' ``x``, in place; the RMSNorm of that.

        ``x``, ``residual`` [num_tokens, hidden_size], for which ``fits``; ``weight`` [hidden_size].
        The sum is computed in float32 and rounded before it is normalized. ``pdl``: see
        ``FusedSum``; the kernel does read ``residual`` before it waits.
        """
        assert x.is_contiguous() and residual.is_contiguous()
        self._stream = torch.cuda.current_stream(x.device)
        num_tokens, hidden_size = x.shape
        normalized = torch.empty_like(x)
        self._kernels.trtllm_allreduce_fusion(
            x,
            self._size,
            self._rank,
            num_tokens,
            hidden_size,
            self._workspace,
            pdl,  # launch_with_pdl
            True,  # use_oneshot
            not pdl,  # trigger_completion_at_end
            True,  # fp32_acc
            _ALL_REDUCE_ADD_NORM,
            None,  # allreduce_out
            residual,  # residual_in
            residual,  # residual_out
            normalized,  # norm_out
            None,  # quant_out
            None,  # scale_out
            weight,  # rms_gamma
            eps,  # rms_eps
            None,  # scale_factor
            None,  # layout_code
            None,  # block_quant_group_size
            None,  # weight_bias
        )
        return normalized

    def let_go(self) -> None:
        self._letting_go.begin(patience_s=0.0)

    def _let_go(self) -> None:
        """Write zeros in place of the data that a lost rank never sends, so that kernels end.

        Each kernel clears a buffer for the next ones, so this goes on until all have run.
        """
        deadline = time.monotonic() + _LET_GO_S
        with torch.cuda.device(self._stream.device):
            while not self._stream.query() and time.monotonic() < deadline:
                self._memory.fill(0, self._beside.cuda_stream)
                time.sleep(0.001)


def most_bytes(num_ranks: int) -> int:
    """The size of the largest tensors that are summed, a multiple of ``_ALIGNMENT``."""
    return _MOST_SENT // (num_ranks - 1) // _ALIGNMENT * _ALIGNMENT


def is_built(num_ranks: int) -> bool:
    """Whether FlashInfer has kernels for this number of ranks, compiled already."""
    if num_ranks not in _SIZES or importlib.util.find_spec("flashinfer") is None:
        return False
    try:
        return bool(_library().is_compiled)
    except Exception as error:  # an unknown GPU, a cache that cannot be written: use NCCL
        logger.warning("comm=flashinfer is not available: %s", error)
        return False


def _load_kernels() -> Any:
    """FlashInfer's functions; compiled at first use if they did not come with FlashInfer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _library().build_and_load()


def _library() -> Any:
    """FlashInfer's builder of these kernels.

    Not by ``flashinfer.comm``, which uses PyTorch's symmetric memory.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from flashinfer.jit.comm import gen_trtllm_comm_module
    except ImportError as error:
        raise ConfigError(
            f"comm=flashinfer needs flashinfer ({error}): {packages.FLASH_INFER}"
        ) from error
    return gen_trtllm_comm_module()
