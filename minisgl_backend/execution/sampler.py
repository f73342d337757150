"""From logits to tokens on a CPU: all parameters of ``SamplingParams``, for whole batches at once.

A GPU samples by ``kernels.sampling``, which adjusts logits alike and draws other random numbers.

The parameters are kept in host arrays, indexed by row, and a step looks up those of its rows. Rows
that ask for nothing special do not pay for the others: a batch of plain greedy rows takes one
argmax. Must not know pages, attention or models.

The order is: penalties; logit_bias; before ``min_tokens`` tokens, stop tokens are made impossible;
then the choice. At temperature 0 it is the most likely token, otherwise one drawn at random by
temperature, top_k, top_p and min_p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minisgl_backend.attention.base import HostArray
from minisgl_backend.execution.choose import at_random, at_random_filtered, greedy
from minisgl_backend.execution.logprobs import RawLogprobs
from minisgl_backend.execution.penalties import TokenCounts
from minisgl_backend.execution.sampling_lines import bias_of, held_back
from minisgl_backend.execution.uniform import uniform
from minisgl_backend.plan import NO_TOKEN, Admission
from minisgl_backend.request import SamplingParams

_Records: TypeAlias = npt.NDArray[np.void]

_COPIED: Final = {
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "seed": np.uint64,
    "min_tokens": np.int64,
}
_DERIVED: Final = {
    "num_prompt_tokens": np.int64,
    "num_logprobs": np.int64,  # -1 for none
    "choice": np.int64,  # one of the three below
    "penalized": np.bool_,
    "biased": np.bool_,
    "stoppable": np.bool_,
    "plain": np.bool_,  # greedy, and its logits are never adjusted
}
_GREEDY, _RANDOM, _FILTERED = range(3)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What a step sampled: ``tokens`` int64[num_samples], NO_TOKEN if logits were not finite.

    ``logprobs`` is None if no row asks for them.
    """

    tokens: Tensor
    logprobs: RawLogprobs | None


class Sampler:
    """Sampling parameters and token counts of all rows, and the sampling itself."""

    def __init__(self, *, max_rows: int, vocab_size: int):
        self._vocab_size = vocab_size
        self._counts = TokenCounts(vocab_size)
        self._records: _Records = np.zeros(max_rows, list({**_COPIED, **_DERIVED}.items()))
        self._biases: dict[int, tuple[HostArray, npt.NDArray[np.float32]]] = {}
        self._stops: dict[int, HostArray] = {}

    def admit(self, admission: Admission) -> None:
        """Let a request take a row."""
        params, row = admission.sampling, admission.row
        self.release(row)
        bias, stops = bias_of(params, self._vocab_size), held_back(params, self._vocab_size)
        if bias is not None:
            self._biases[row] = bias
        if len(stops):
            self._stops[row] = stops
        if params.has_penalties:
            self._counts.open(row, admission.history, admission.num_prompt_tokens)

        record = self._records[row]
        for name in _COPIED:
            record[name] = getattr(params, name)
        record["num_prompt_tokens"] = admission.num_prompt_tokens
        record["num_logprobs"] = -1 if params.num_logprobs is None else params.num_logprobs
        record["choice"] = _choice(params)
        record["penalized"] = params.has_penalties
        record["biased"] = row in self._biases
        record["stoppable"] = row in self._stops
        record["plain"] = params.is_greedy and not (
            params.has_penalties or row in self._biases or row in self._stops
        )

    def release(self, row: int) -> None:
        """Forget the request that holds the row, if there is one."""
        self._counts.close(row)
        self._biases.pop(row, None)
        self._stops.pop(row, None)

    def sample(self, logits: Tensor, rows: HostArray, positions: HostArray) -> Sample:
        """Sample one token for each line of ``logits``, [num_samples, vocab_size].

        ``rows`` and ``positions``, int64[num_samples], are the row and the position of each new
        token. The logits are not changed.
        """
        records = self._records[rows]
        if records["plain"].all():
            tokens = greedy(logits)
        else:
            tokens = self._sample_any(logits, rows, records, positions)
        finite = logits.amax(dim=-1).isfinite()
        tokens = torch.where(finite, tokens, NO_TOKEN)
        penalized = np.flatnonzero(records["penalized"])
        if len(penalized):
            self._counts.record(rows[penalized], tokens[torch.from_numpy(penalized)])
        return Sample(
            tokens, RawLogprobs.of(logits, tokens, records["num_logprobs"], torch.from_numpy)
        )

    def _sample_any(
        self, logits: Tensor, rows: HostArray, records: _Records, positions: HostArray
    ) -> Tensor:
        """Tokens int64[num_samples], of rows that need not all be plain."""
        num_generated = positions - records["num_prompt_tokens"]
        masked = records["stoppable"] & (num_generated < records["min_tokens"])
        adjusted = records["penalized"] | records["biased"] | masked

        def choose(adjust: int, group: HostArray, of_group: Tensor) -> Tensor:
            if adjust:
                of_group = self._adjust(of_group, rows[group], records[group], masked[group])
            return self._choose(of_group, records[group], positions[group])

        return self._by_group(adjusted.astype(np.int64), logits, choose)

    def _choose(self, logits: Tensor, records: _Records, positions: HostArray) -> Tensor:
        """Tokens int64[num_rows] from adjusted logits, [num_rows, vocab_size]."""
        drawn = uniform(records["seed"], positions)

        def choose(choice: int, group: HostArray, of_group: Tensor) -> Tensor:
            if choice == _GREEDY:
                return greedy(of_group)

            def column(values: npt.NDArray[Any]) -> Tensor:
                return torch.from_numpy(values[group][:, None])

            temperature, number = column(records["temperature"]), column(drawn)
            if choice == _RANDOM:
                return at_random(of_group, temperature, number)
            return at_random_filtered(
                of_group,
                temperature,
                number,
                top_k=column(records["top_k"]),
                top_p=column(records["top_p"]),
                min_p=column(records["min_p"]),
            )

        return self._by_group(records["choice"], logits, choose)

    def _by_group(
        self,
        labels: HostArray,
        logits: Tensor,
        choose: Callable[[int, HostArray, Tensor], Tensor],
    ) -> Tensor:
        """Tokens int64[num_rows], chosen for all rows of the same label together.

        ``choose`` gets a label, the indices of its rows, and their logits.
        """
        found = np.unique(labels).tolist()
        if len(found) == 1:
            return choose(found[0], np.arange(len(labels)), logits)
        tokens = torch.empty(len(labels), dtype=torch.int64)
        for label in found:
            group = np.flatnonzero(labels == label)
            index = torch.from_numpy(group)
            tokens[index] = choose(label, group, logits[index])
        return tokens

    def _adjust(
        self, logits: Tensor, rows: HostArray, records: _Records, masked: npt.NDArray[np.bool_]
    ) -> Tensor:
        """A copy of [num_rows, vocab_size] logits after penalties, biases and masks."""
        logits = logits.clone()
        penalized, biased = np.flatnonzero(records["penalized"]), np.flatnonzero(records["biased"])
        if len(penalized):
            index = torch.from_numpy(penalized)
            logits[index] = self._counts.penalize(
                logits[index],
                rows[penalized],
                repetition=torch.from_numpy(records["repetition_penalty"][penalized][:, None]),
                presence=torch.from_numpy(records["presence_penalty"][penalized][:, None]),
                frequency=torch.from_numpy(records["frequency_penalty"][penalized][:, None]),
            )
        if len(biased):
            tokens, values = zip(*(self._biases[row] for row in rows[biased].tolist()), strict=True)
            bias = torch.from_numpy(np.concatenate(values)).to(logits.dtype)
            logits.index_put_(self._places(biased, tokens), bias, accumulate=True)
        if masked.any():
            stops = tuple(self._stops[row] for row in rows[masked].tolist())
            never = logits.new_tensor(float("-inf"))
            logits.index_put_(self._places(np.flatnonzero(masked), stops), never)
        return logits

    def _places(self, index: HostArray, tokens: tuple[HostArray, ...]) -> tuple[Tensor, Tensor]:
        """Row and column in the logits of each of ``tokens``, which has an array for each index."""
        counts = [len(of_row) for of_row in tokens]
        return torch.from_numpy(np.repeat(index, counts)), torch.from_numpy(np.concatenate(tokens))


def _choice(params: SamplingParams) -> int:
    if params.is_greedy:
        return _GREEDY
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return _FILTERED if filtered else _RANDOM
