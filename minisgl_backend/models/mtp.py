"""The MTP layer: a decoder layer behind the last one, which predicts the token after the next.

Position i takes the model's normalized hidden state of position i and the embedding of token i + 1.
Its result, normalized, predicts token i + 2; it may take the place of the model's hidden state at
position i + 1, which so predicts one more token. Modules have the names of GLM's and DeepSeek's
checkpoints. Must not know where hidden states and tokens come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minisgl_backend.layers.linear import RowLinear
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.models.decoder_layers import DecoderLayer, MakeExperts, residual_norm
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import StepContext
from minisgl_backend.parallel.group import Group


class MTPLayer(DecoderLayer):
    """The layer, with what joins its inputs, and with a final norm. The ranks split the inputs of
    the projection that joins them."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        group: Group,
        matrices: Matrices,
        experts: MakeExperts,
    ):
        super().__init__(spec, layer, group, matrices, experts)
        self.enorm = residual_norm(spec)
        self.hnorm = residual_norm(spec)
        self.eh_proj = RowLinear(
            f"model.layers.{layer}.eh_proj",
            2 * spec.hidden_size,
            spec.hidden_size,
            bias=False,
            group=group,
            matrices=matrices,
        )
        self.shared_head = _Head(residual_norm(spec))

    def states(self, embedded: Tensor, hidden: Tensor, step: StepContext) -> Tensor:
        """The layer's hidden states, normalized, from embeddings of tokens and from normalized
        hidden states of the positions before them; each [num_tokens, hidden_size]."""
        pdl, norm = step.pdl, self.shared_head.norm
        pair = Normed(embedded, self.enorm), Normed(hidden, self.hnorm)
        joined = torch.cat([x.normalized(pdl=pdl) for x in pair], dim=1)
        ins = self.eh_proj.matrix.ins
        own = joined[:, ins.start : ins.end].contiguous()
        residual = self.eh_proj(Normed(own), pdl=pdl)
        _, x = self(residual, Normed(residual, self.input_layernorm), norm, step)
        assert isinstance(x, Normed)
        return x.normalized(pdl=pdl)


class _Head(nn.Module):
    """The final norm, which checkpoints have beside a copy of the output head."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm
