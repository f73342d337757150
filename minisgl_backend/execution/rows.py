"""The state of all rows on a GPU, as the host writes it.

Knows ``kernels.rows.RowTable``, and which rows ask for logprobs. An admission overwrites the whole
state of a row, except lines of the sampling table that it does not need: nobody reads these.
Must not know models or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from minisgl_backend.attention.base import HostArray
from minisgl_backend.device.base import Device
from minisgl_backend.execution.sampling_lines import bias_of, marks_of
from minisgl_backend.kernels.rows import RowTable
from minisgl_backend.kernels.sampling_table import COLUMNS
from minisgl_backend.plan import Admission
from minisgl_backend.request import IntArray

_LEAST_FACTOR: Final = 1e-30
"""A repetition penalty is kept between this and its inverse: beyond, it could make logits infinite,
which means broken ones."""


class DeviceRows:
    """Writes admissions into a ``RowTable``; and grants, as the inbox of a captured step does."""

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_sequence_length: int,
        page_size: int,
        dummy_page: int,
        vocab_size: int,
    ):
        self._device = device
        self.page_size = page_size
        self.table = RowTable.empty(
            max_rows,
            max_pages=-(-max_sequence_length // page_size),
            dummy_page=dummy_page,
            vocab_size=vocab_size,
            device=device.torch_device,
        )
        self.num_logprobs = np.full(max_rows + 1, -1, np.int64)  # -1 for none

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Let requests take rows: copy to the GPU how each is sampled."""
        table = self.table.sampling
        numbers = np.empty((len(admissions), len(COLUMNS)), np.float32)
        for index, admission in enumerate(admissions):
            marks = marks_of(admission, table.vocab_size)
            bias = bias_of(admission.sampling, table.vocab_size)
            numbers[index] = _numbers(
                admission, table.vocab_size, marked=marks is not None, biased=bias is not None
            )
            self.num_logprobs[admission.row] = _num_logprobs(admission)
            self._write_line(table.marks[admission.row], marks)
            self._write_line(table.bias[admission.row], bias)
        rows = self._device.upload(np.array([admission.row for admission in admissions], np.int64))
        seeds = np.array([admission.sampling.seed for admission in admissions], np.uint64)
        table.numbers[rows] = self._device.upload(numbers)
        table.seeds[rows] = self._device.upload(seeds.view(np.int64))

    def grant(self, rows: IntArray, indices: IntArray, pages: IntArray) -> None:
        """Write grants to the page table: pages[row, index] = page. Each is int32[num_grants]."""
        if len(rows):
            to_rows, at, granted = self._device.upload(np.stack([rows, indices, pages]))
            self.table.pages[to_rows, at] = granted

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The slots of (row, position) pairs: where their keys and values go.

        Arguments and result are int64[num_tokens].
        """
        pages = self.table.pages[rows, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def _write_line(self, line: Tensor, known: tuple[HostArray, npt.NDArray[Any]] | None) -> None:
        """Write zeros, and these tokens' values; if nothing is known, the line is not read."""
        if known is not None:
            tokens, values = known
            line.zero_()[self._device.upload(tokens)] = self._device.upload(values)


def _numbers(
    admission: Admission, vocab_size: int, *, marked: bool, biased: bool
) -> tuple[float, ...]:
    """The line of ``SamplingTable.numbers``. float32 holds whole numbers up to 2^24, and no
    vocabulary or sequence has more."""
    params = admission.sampling
    values = {
        "temperature": 0.0 if params.is_greedy else params.temperature,
        "top_k": min(params.top_k, vocab_size),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition": min(max(params.repetition_penalty, _LEAST_FACTOR), 1 / _LEAST_FACTOR),
        "presence": params.presence_penalty,
        "frequency": params.frequency_penalty,
        "stops_from": min(admission.num_prompt_tokens + params.min_tokens, 2**24),
        "marked": marked,
        "biased": biased,
    }
    return tuple(values[name] for name in COLUMNS)


def _num_logprobs(admission: Admission) -> int:
    asked = admission.sampling.num_logprobs
    return -1 if asked is None else asked
