"""Log-probabilities of sampled tokens under the model's raw logits.

Raw means before temperature, penalties and filters: what the model predicted, however the request
is sampled. Must not know how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.kernels.likelihood import Likelihoods, likelihoods
from minisgl_backend.request import IntArray, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class RawLogprobs:
    """Log-probabilities of the n samples whose requests ask for them.

    On the host, int64[n]: ``samples``, their indices among all samples of the step; ``counts``, the
    number of alternatives that each asks for. ``found`` [n], with as many alternatives as the
    largest of these numbers, is on the device until ``download``.
    """

    samples: HostArray
    counts: HostArray
    found: Likelihoods

    @classmethod
    def of(
        cls,
        logits: Tensor,
        tokens: Tensor,
        num_logprobs: HostArray,
        upload: Callable[[HostArray], Tensor],
    ) -> RawLogprobs | None:
        """From ``logits`` [num_samples, vocab_size] and ``tokens`` int [num_samples].

        ``num_logprobs`` [num_samples] is -1 for a sample that asks for none. Returns None if no
        sample asks for any. ``upload`` copies to the device of the logits.
        """
        samples = np.flatnonzero(num_logprobs >= 0)
        if len(samples) == 0:
            return None
        counts = num_logprobs[samples]
        index = upload(samples)
        most = min(int(counts.max()), logits.shape[1])
        return cls(samples, counts, likelihoods(logits[index], tokens[index].clamp_min(0), most))

    def download(self, device: Device) -> RawLogprobs:
        """The same, with all tensors on the host."""
        return replace(self, found=self.found.each(device.download))

    def by_sample(self, token_ids: IntArray) -> dict[int, TokenLogprobs]:
        """The log-probabilities by index of the sample; samples without a valid token are left out.

        All tensors must be on the host.
        """
        found, by_sample = self.found, {}
        rows = zip(
            self.samples.tolist(),
            self.counts.tolist(),
            found.logprobs.tolist(),
            found.ranks.tolist(),
            found.top_ids.tolist(),
            found.top.tolist(),
            strict=True,
        )
        for sample, count, logprob, rank, ids, logprobs in rows:
            if token_ids[sample] >= 0:
                alternatives = tuple(zip(ids[:count], logprobs[:count], strict=True))
                by_sample[sample] = TokenLogprobs(logprob, rank, alternatives)
        return by_sample
