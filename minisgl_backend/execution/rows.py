"""The state of all rows on a GPU, as the host writes and reads it.

Knows ``kernels.rows.RowTable``, and which rows ask for more than a captured step can sample
(``is_special``). Must not know models or attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device
from minisgl_backend.kernels.rows import RowTable
from minisgl_backend.kernels.sampling import RowParameters
from minisgl_backend.plan import Admission
from minisgl_backend.request import IntArray, SamplingParams


class DeviceRows:
    """Writes admissions and grants into a ``RowTable``, and reads rows of it: for all steps but
    captured decode steps, which do so themselves."""

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_sequence_length: int,
        page_size: int,
        dummy_page: int,
    ):
        self._device = device
        self.page_size = page_size
        self.table = RowTable.empty(
            max_rows,
            max_pages=-(-max_sequence_length // page_size),
            dummy_page=dummy_page,
            device=device.torch_device,
        )
        self.is_special = np.zeros(max_rows, np.bool_)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Let requests take rows: copy to the GPU how each is sampled, for all in a few copies."""
        rows = np.array([admission.row for admission in admissions], np.int64)
        params = [admission.sampling for admission in admissions]
        self.is_special[rows] = [_is_special(of_row) for of_row in params]
        numbers = np.array(
            [[p.temperature, p.top_p, p.min_p, p.top_k] for p in params], np.float32
        )  # a top_k beyond 2^24 is beyond any vocabulary, so float32 holds what matters
        seeds = np.array([p.seed for p in params], np.uint64).view(np.int64)
        index, values, keys = (self._device.upload(array) for array in (rows, numbers, seeds))
        table = self.table
        table.temperature[index] = values[:, 0]
        table.top_p[index] = values[:, 1]
        table.min_p[index] = values[:, 2]
        table.top_k[index] = values[:, 3].to(torch.int32)
        table.seeds[index] = keys

    def grant(self, rows: IntArray, indices: IntArray, pages: IntArray) -> None:
        """Write grants to the page table: pages[row, index] = page. Each is int32[num_grants]."""
        if len(rows):
            grants = self._device.upload(np.stack([rows, indices, pages]).astype(np.int64))
            self.table.pages[grants[0], grants[1]] = grants[2].to(torch.int32)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The slots of (row, position) pairs: where their keys and values go.

        Arguments and result are int64[num_tokens].
        """
        pages = self.table.pages[rows, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def sampling(self, rows: Tensor, positions: Tensor) -> RowParameters:
        """How these rows are sampled at these positions, both int64[num_samples]."""
        table = self.table
        return RowParameters(
            temperature=table.temperature[rows],
            top_k=table.top_k[rows],
            top_p=table.top_p[rows],
            min_p=table.min_p[rows],
            seeds=table.seeds[rows],
            positions=positions,
        )

    def keep(self, rows: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Keep the last tokens of rows, and their positions. NO_TOKEN is kept as 0, a valid id."""
        self.table.tokens[rows] = tokens.clamp_min(0).to(torch.int32)
        self.table.lengths[rows] = lengths.to(torch.int32)


def _is_special(params: SamplingParams) -> bool:
    """Whether sampling needs more than logits and the parameters of ``RowTable``."""
    return bool(
        params.has_penalties
        or params.logit_bias
        or (params.min_tokens and params.stop_token_ids)
        or params.num_logprobs is not None
    )
