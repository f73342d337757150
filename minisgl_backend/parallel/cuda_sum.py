"""All-reduce, residual add and RMSNorm in one kernel of this package (``kernels.cuda.fused_sum``).

Each rank writes to the memory of every rank, so all must be GPUs of one host. There are no flags
beside the data: memory that waits for data holds -0.0, which is never sent. The kernels can be
captured like any other, since the GPU itself knows which buffer is in use. A kernel that waits for
a lost rank does not end by itself; ``let_go`` ends it. Must not know models.
"""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor

from minisgl_backend.kernels.cuda.fused_sum import NUM_BUFFERS, UNSENT, FusedSumKernels
from minisgl_backend.kernels.sum_cut import LARGEST_SIZE
from minisgl_backend.parallel.group import Group
from minisgl_backend.parallel.leaving import Leaving
from minisgl_backend.parallel.peer_memory import PeerMemory

_BUFFER_BYTES: Final = 32 * 2**20
"""If there are more rows than fit, they are summed part by part."""
_DTYPES: Final = (torch.bfloat16, torch.float16)
_LET_GO_S: Final = 10.0


class CudaSum:
    """The kernels and their memory (``FusedSum``). All ranks of a host make theirs at the same
    time."""

    def __init__(self, host: Group, device: torch.device):
        """``host`` is a group of the same ranks for tensors in main memory."""
        self._letting_go = Leaving(self._let_go)
        with torch.cuda.device(device):
            self._memory = PeerMemory(host, NUM_BUFFERS * _BUFFER_BYTES, UNSENT)
            self._kernels = FusedSumKernels(
                self._memory.addresses, host.rank, _BUFFER_BYTES, device
            )
            self._beside = torch.cuda.Stream(device)
            self._stream = torch.cuda.current_stream(device)
            torch.cuda.synchronize(device)

    def fits(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> bool:
        is_row = hidden_size % 8 == 0 and 0 < hidden_size <= LARGEST_SIZE
        return dtype in _DTYPES and is_row and num_tokens > 0

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, pdl: bool = False
    ) -> Tensor:
        """See ``FusedSum``. The sum is computed in float32, in the order of the ranks, and rounded
        before ``residual`` is added. So each row gets the same bits, however many rows there are.
        """
        assert x.is_contiguous() and residual.is_contiguous()
        self._stream = torch.cuda.current_stream(x.device)
        return self._kernels.add_rms_norm(x, residual, weight, eps, pdl=pdl)

    def let_go(self) -> None:
        self._letting_go.begin(patience_s=0.0)

    def _let_go(self) -> None:
        """Write zeros in place of the data that a lost rank never sends, so that kernels end.

        Each kernel empties what it takes, so this is repeated until all have run.
        """
        deadline = time.monotonic() + _LET_GO_S
        with torch.cuda.device(self._stream.device):
            while not self._stream.query() and time.monotonic() < deadline:
                self._memory.fill(0, self._beside.cuda_stream)
                time.sleep(0.001)
