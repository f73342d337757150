"""The MTP layer: a decoder layer behind the last one, which predicts the token after the next.

Position i takes the model's normalized hidden state of position i and the embedding of token i + 1.
Its result, normalized, predicts token i + 2; it may take the place of the model's hidden state at
position i + 1, which so predicts one more token. Modules have the names of GLM's and DeepSeek's
checkpoints. Must not know where hidden states and tokens come from.

``GuessingLayer`` is what the layer has in common with others that guess in its place (``eagle``).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from minisgl_backend.layers.embedding import OutputHead, VocabEmbedding
from minisgl_backend.layers.linear import RowLinear
from minisgl_backend.layers.matrix import DenseMatrix
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.quantized_matrix import QuantizedMatrix, rounded
from minisgl_backend.models.decoder_layers import DecoderLayer, LayerRecipe, residual_norm
from minisgl_backend.models.token_mixing import StepContext


class GuessingLayer(Protocol):
    """A layer that guesses: states of its own, from which it makes the best next tokens.

    It reads the model's residual stream before each of ``read_layers``, or behind the last layer if
    there are none. States are [num_tokens, ``state_size``].
    """

    read_layers: tuple[int, ...]
    state_size: int

    @property
    def embedding(self) -> VocabEmbedding | None:
        """The layer's own embedding; None if it takes the model's."""

    @property
    def outside_kernels(self) -> nn.Module:
        """The part that the kernels for whole layers of the model do not know."""

    def first_states(self, layer_input: Tensor, norm: RMSNorm) -> Tensor:
        """The states that the first pass takes. ``layer_input`` is [num_tokens, hidden_size] or,
        with ``read_layers``, that many times as wide. ``norm`` is the model's final one."""

    def states(self, embedded: Tensor, states: Tensor, step: StepContext) -> Tensor:
        """The next states, from embeddings of tokens and from ``states`` of the positions before
        them, which may be overwritten.

        Whatever ``states`` are, keys and values are made of finite numbers: no sampled token would
        show NaN in them (``cache.kv``)."""

    def best_tokens(self, states: Tensor, head: OutputHead) -> Tensor:
        """The likeliest tokens by the states; ``head`` is the model's."""


class MTPLayer(DecoderLayer):
    """The layer, with what joins its inputs, and with a final norm (``GuessingLayer``). The ranks
    split the inputs of the projection that joins them. States are normalized."""

    read_layers: tuple[int, ...] = ()
    embedding: VocabEmbedding | None = None

    def __init__(self, recipe: LayerRecipe):
        super().__init__(recipe)
        spec = recipe.spec
        self.state_size = spec.hidden_size
        self.enorm = residual_norm(spec)
        self.hnorm = residual_norm(spec)
        self.eh_proj = RowLinear(
            f"{recipe.name}.eh_proj",
            2 * spec.hidden_size,
            spec.hidden_size,
            bias=False,
            group=recipe.group,
            matrices=recipe.matrices,
        )
        self.shared_head = _Head(residual_norm(spec))
        self.rounded_head: QuantizedMatrix | None = None

    @property
    def outside_kernels(self) -> nn.Module:
        return self.eh_proj

    def first_states(self, layer_input: Tensor, norm: RMSNorm) -> Tensor:
        return Normed(layer_input, norm).normalized(pdl=False)

    def states(self, embedded: Tensor, states: Tensor, step: StepContext) -> Tensor:
        pdl, norm = step.pdl, self.shared_head.norm
        pair = Normed(embedded, self.enorm), Normed(states, self.hnorm)
        joined = torch.cat([x.normalized(pdl=pdl) for x in pair], dim=1)
        ins = self.eh_proj.matrix.ins
        own = joined[:, ins.start : ins.end].contiguous()
        residual = self.eh_proj(Normed(own), pdl=pdl).nan_to_num_()
        _, x = self(residual, Normed(residual, self.input_layernorm), norm, step)
        assert isinstance(x, Normed)
        return x.normalized(pdl=pdl)

    def round_head(self, head: OutputHead) -> None:
        """Guess with a copy of the model's ``head`` in 8 bits, once it is loaded: a guess takes
        mostly as long as the head is read."""
        assert isinstance(head.matrix, DenseMatrix)
        self.rounded_head = rounded(head.matrix)

    def best_tokens(self, states: Tensor, head: OutputHead) -> Tensor:
        if self.rounded_head is None:
            part = head.part(Normed(states))
        else:
            part = self.rounded_head.gemm(Normed(states))[:, : head.share].contiguous()
        return head.gathered(part).argmax(dim=-1)


class _Head(nn.Module):
    """The final norm, which checkpoints have beside a copy of the output head."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm
