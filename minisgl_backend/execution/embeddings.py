"""Embeddings of prompts: the hidden state of a prompt's last token, normalized to length 1.

It is what the output head would read at that token, in the step that computes the prompt's last
chunk. Runs after the layers, only on rank 0, whose residual stream is complete.

Must not know pages, attention or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from minisgl_backend.device.base import Device, HostArray
from minisgl_backend.execution.flat_batch import FlatBatch
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.plan import Admission
from minisgl_backend.request import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The embeddings of a step: ``found`` float32 [num_embedded, hidden_size], on the device until
    ``download``. ``samples`` int64 [num_embedded], on the host: the indices of their rows among
    those that get a token."""

    samples: HostArray
    found: Tensor

    def download(self, device: Device) -> Embeddings:
        """The same on the host, valid once the queue has run the copy."""
        return replace(self, found=device.download(self.found))

    def by_sample(self) -> Mapping[int, FloatArray]:
        """The embeddings, each [hidden_size], by their elements of ``samples``. All must be on the
        host."""
        found: FloatArray = self.found.numpy()
        return {int(sample): found[i].copy() for i, sample in enumerate(self.samples)}


class PromptEmbedder:
    """Embeds the prompts of the requests that ask for it."""

    def __init__(self, model: Decoder, device: Device, *, num_rows: int) -> None:
        """``num_rows`` is that of the row table."""
        self._model = model
        self._device = device
        self._is_asked = np.zeros(num_rows, np.bool_)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Note which requests ask for an embedding."""
        for admission in admissions:
            self._is_asked[admission.row] = admission.sampling.embed

    def embedded(self, hidden: Tensor, batch: FlatBatch) -> Embeddings | None:
        """The embeddings of the prompts that end in a step, if there are any.

        ``hidden`` [num_tokens, hidden_size] is the residual stream of the step.
        """
        samples = np.flatnonzero(self._is_asked[batch.sample_rows])
        if not len(samples):
            return None
        where = self._device.upload(batch.sample_indices[samples])
        return Embeddings(samples, self.embed(hidden.index_select(0, where)))

    def embed(self, hidden: Tensor) -> Tensor:
        """The embeddings, float32 [num_rows, hidden_size], of rows of the residual stream."""
        return F.normalize(self._model.normed(hidden).float(), dim=-1)
