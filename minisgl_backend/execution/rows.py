"""Writes the state of rows on the device: admissions and page grants.

An admission overwrites the whole state of a row, except lines of the sampling table that the
request does not need, which are never read. Knows ``kernels.rows.RowTable``. Must not know models
or attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.kernels.rows import RowTable
from minisgl_backend.kernels.sampling_table import COLUMNS, IN_PROMPT, IS_STOP, ONCE
from minisgl_backend.plan import NO_PAGE, Admission, Grants
from minisgl_backend.request import FloatArray, IntArray, SamplingParams

_LEAST_FACTOR: Final = 1e-30
"""Repetition penalties are clamped between this and its inverse: others could make logits infinite,
which would count as a failure of the model."""


class DeviceRows:
    """Writes admissions and grants into a ``RowTable``."""

    def __init__(
        self,
        device: Device,
        *,
        max_rows: int,
        max_sequence_length: int,
        page_size: int,
        dummy_page: int,
        vocab_size: int,
        dummy_window_page: int | None,
        most_guesses: int,
        mtp_tokens: int,
    ):
        """``dummy_window_page`` is given if layers have window pages. ``most_guesses`` are checked
        in a step, beside a token of each row; an MTP layer guesses ``mtp_tokens`` of a row."""
        self._device = device
        self._dummy_window_page = dummy_window_page
        self.page_size = page_size
        self.table = RowTable.empty(
            max_rows,
            max_pages=-(-max_sequence_length // page_size),
            dummy_page=dummy_page,
            vocab_size=vocab_size,
            device=device.torch_device,
            dummy_window_page=dummy_window_page,
            most_guesses=most_guesses,
            mtp_tokens=mtp_tokens,
        )

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give rows to requests: copy their sampling parameters to the device, in one buffer of
        int64.

            for each admission              row | seed | the bits of each of its numbers
            for each line of marks or bias  tokens | the bits of their values
        """
        table, vocab_size = self.table.sampling, self.table.sampling.vocab_size
        rows = np.empty((len(admissions), 2 + len(COLUMNS)), np.int64)
        parts, lines = [rows], list[Tensor]()  # the lines of all parts but the first
        for of_row, admission in zip(rows, admissions, strict=True):
            marks, bias = marks_of(admission, vocab_size), bias_of(admission, vocab_size)
            is_marked, is_biased = marks is not None, bias is not None
            numbers = _numbers(admission, vocab_size, marked=is_marked, biased=is_biased)
            of_row[0] = admission.row
            of_row[1:2].view(np.uint64)[0] = admission.sampling.seed
            of_row[2:] = np.array(numbers, np.float32).view(np.int32)
            for target, entries in ((table.marks, marks), (table.bias, bias)):
                if entries is not None:  # a line without entries is never read, so it is left alone
                    tokens, values = entries
                    parts.append(np.stack([tokens, values.view(np.int32)]))
                    lines.append(target[admission.row])
        buffer = self._device.upload(np.concatenate([part.ravel() for part in parts]))
        end = rows.size
        of_rows = buffer[:end].view(rows.shape)
        to_rows = of_rows[:, 0]
        table.seeds[to_rows] = of_rows[:, 1]
        table.numbers[to_rows] = of_rows[:, 2:].int().view(torch.float32)
        for line, part in zip(lines, parts[1:], strict=True):
            begin, end = end, end + part.size
            to_tokens, bits = buffer[begin:end].view(part.shape)
            line.zero_()[to_tokens] = bits.int().view(line.dtype)

    def lines_of(self, grants: Grants, window_grants: Grants) -> IntArray:
        """The grants of a plan, int32[3, num_grants]: lines of the row table, indices and pages."""
        of_pages = np.stack([grants.rows, grants.indices, grants.pages])
        if not len(window_grants.rows):
            return of_pages
        assert self._dummy_window_page is not None
        lines = window_grants.rows + len(self.table.tokens)
        has_page = window_grants.pages != NO_PAGE
        pages = np.where(has_page, window_grants.pages, self._dummy_window_page)
        of_windows = np.stack([lines, window_grants.indices, pages])
        return np.concatenate([of_pages, of_windows], axis=1, dtype=np.int32)

    def grant(self, grants: IntArray) -> None:
        """Write the grants that ``lines_of`` returned: lines[line, index] = page."""
        if grants.shape[1]:
            lines, at, granted = self._device.upload(grants.astype(np.int64))
            self.table.lines[lines, at] = granted.int()

    def slots(self, rows: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        """The slots for the keys and values of tokens: at ``offsets`` in the pages with ``indices``
        of their rows.

        Arguments are int32 or int64 [num_tokens]; the result has the type of the offsets.
        """
        return torch.add(offsets, self.table.pages[rows, indices], alpha=self.page_size)

    def window_slots(self, rows: Tensor, indices: Tensor, offsets: Tensor) -> Tensor | None:
        """The same in window pages, if there are any."""
        table = self.table.window_pages
        if table is None:
            return None
        return torch.add(offsets, table[rows, indices], alpha=self.page_size)


def marks_of(admission: Admission, vocab_size: int) -> tuple[HostArray, IntArray] | None:
    """Tokens int64[n] and their marks int32[n]; None if the row needs no marks.

    Ids beyond the vocabulary get neither a mark nor a bias.
    """
    params = admission.sampling
    stops = _held_back(params, vocab_size)
    if not params.has_penalties:
        return (stops, np.full(len(stops), IS_STOP, np.int32)) if len(stops) else None
    prompt, output = np.split(admission.history, [admission.num_prompt_tokens])
    line = ONCE * np.bincount(output, minlength=vocab_size)
    line[prompt] += IN_PROMPT
    line[stops] += IS_STOP
    tokens = np.flatnonzero(line != 0)
    return tokens, line[tokens].astype(np.int32)


def bias_of(admission: Admission, vocab_size: int) -> tuple[HostArray, FloatArray] | None:
    """Tokens int64[n] and the biases of their logits, float32[n]; None if there are none."""
    known = range(vocab_size)
    bias = [(token, value) for token, value in admission.sampling.logit_bias if token in known]
    if not bias:
        return None
    ids, values = zip(*bias, strict=True)
    tokens, at = np.unique(ids, return_inverse=True)
    return tokens, np.bincount(at, values).astype(np.float32)


def _held_back(params: SamplingParams, vocab_size: int) -> HostArray:
    """The stop tokens, int64[n], that must not be sampled before there are ``min_tokens``. Empty
    with a grammar: then masks hold them back, unless that would leave no token."""
    holds_back = params.min_tokens > 0 and params.grammar is None
    stops, known = params.stop_token_ids if holds_back else (), range(vocab_size)
    return np.unique(np.array([token for token in stops if token in known], np.int64))


def _numbers(
    admission: Admission, vocab_size: int, *, marked: bool, biased: bool
) -> tuple[float, ...]:
    """The line of ``SamplingTable.numbers``. float32 is exact for whole numbers up to 2^24, which
    no vocabulary or sequence exceeds."""
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
        "masked": params.grammar is not None,
    }
    return tuple(values[name] for name in COLUMNS)
