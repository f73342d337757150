"""Log-probabilities of sampled tokens under the model's raw logits.

Raw means before temperature, penalties and filters: what the model predicted, however the request
is sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.kernels.likelihood import likelihoods
from minisgl_backend.request import IntArray, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class RawLogprobs:
    """Log-probabilities of the n samples whose requests ask for them.

    On the host, int64[n]: ``samples``, their indices among all samples of the step; ``counts``, how
    many alternatives each asks for. On the device: ``chosen`` [n]; ``ranks`` int64[n], 1 for the
    most likely token; ``alternatives`` and ``alternative_ids`` [n, most], the most likely first,
    where most is the largest of the counts.
    """

    samples: HostArray
    counts: HostArray
    chosen: Tensor
    ranks: Tensor
    alternatives: Tensor
    alternative_ids: Tensor

    @classmethod
    def of(
        cls,
        logits: Tensor,
        tokens: Tensor,
        num_logprobs: HostArray,
        upload: Callable[[HostArray], Tensor],
    ) -> RawLogprobs | None:
        """From [num_samples, vocab_size] logits and int [num_samples] tokens.

        ``num_logprobs`` [num_samples] is -1 for a sample that asks for none. Returns None if no
        sample asks for any. ``upload`` copies to the device of the logits.
        """
        samples = np.flatnonzero(num_logprobs >= 0)
        if len(samples) == 0:
            return None
        counts = num_logprobs[samples]
        index = upload(samples)
        most = min(int(counts.max()), logits.shape[1])
        found = likelihoods(logits[index], tokens[index].clamp_min(0), most)
        return cls(samples, counts, found.logprobs, found.ranks, found.top, found.top_ids)

    def download(self, device: Device) -> RawLogprobs:
        """The same, with all tensors on the host."""
        return RawLogprobs(
            self.samples,
            self.counts,
            device.download(self.chosen),
            device.download(self.ranks),
            device.download(self.alternatives),
            device.download(self.alternative_ids),
        )

    def by_sample(self, token_ids: IntArray) -> dict[int, TokenLogprobs]:
        """The log-probabilities by index of the sample, without samples that have no valid token.

        All tensors must be on the host.
        """
        found = {}
        rows = zip(
            self.samples.tolist(),
            self.counts.tolist(),
            self.chosen.tolist(),
            self.ranks.tolist(),
            self.alternative_ids.tolist(),
            self.alternatives.tolist(),
            strict=True,
        )
        for sample, count, logprob, rank, ids, logprobs in rows:
            if token_ids[sample] >= 0:
                alternatives = tuple(zip(ids[:count], logprobs[:count], strict=True))
                found[sample] = TokenLogprobs(logprob, rank, alternatives)
        return found
