"""Log-probabilities of sampled tokens under the model's raw logits.

Raw: before temperature, penalties and filters, so they tell what the model thought, whatever was
asked of the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import HostArray
from minisgl_backend.device.base import Device
from minisgl_backend.request import IntArray, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class RawLogprobs:
    """For the n samples that asked, at ``samples`` with ``counts`` alternatives each, on the host.

    ``chosen`` [n], ``ranks`` int64[n]; ``alternatives`` and ``alternative_ids`` [n, most], most
    likely first.
    """

    samples: HostArray
    counts: HostArray
    chosen: Tensor
    ranks: Tensor
    alternatives: Tensor
    alternative_ids: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, num_logprobs: HostArray) -> RawLogprobs | None:
        """From [num_samples, vocab_size] logits; ``num_logprobs`` [num_samples] is -1 for none."""
        samples = np.flatnonzero(num_logprobs >= 0)
        if len(samples) == 0:
            return None
        counts = num_logprobs[samples]
        index = torch.from_numpy(samples).to(logits.device)
        logprobs = logits[index].log_softmax(dim=-1)
        chosen = logprobs.gather(1, tokens[index].clamp_min(0).unsqueeze(1))
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        most = min(int(counts.max()), logits.shape[1])
        alternatives, ids = logprobs.topk(most, dim=-1)
        return cls(samples, counts, chosen.squeeze(1), ranks, alternatives, ids)

    def download(self, device: Device) -> RawLogprobs:
        """The same with its tensors on the host."""
        return RawLogprobs(
            self.samples,
            self.counts,
            device.download(self.chosen),
            device.download(self.ranks),
            device.download(self.alternatives),
            device.download(self.alternative_ids),
        )

    def by_sample(self, token_ids: IntArray) -> dict[int, TokenLogprobs]:
        """By index of the sample; those without a token are left out. Needs tensors on the host."""
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
