"""An EAGLE-3 layer (arXiv 2503.01840), which guesses tokens in place of an MTP layer (``mtp``).

Position i takes a hidden state of position i and the embedding of token i + 1, and predicts token
i + 2, as in an MTP layer. But its hidden state is made of the model's residual stream before
several layers. The layer's own residual stream, or its output, is the hidden state of the next
position, if that follows a guess. Its output head has only the most frequent tokens. Modules have
the names of the layer's own checkpoint. Must not know where hidden states and tokens come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.embedding import OutputHead, VocabEmbedding
from minisgl_backend.layers.feed_forward import GatedMLP
from minisgl_backend.layers.linear import RowLinear
from minisgl_backend.layers.matrix import pack_matrices
from minisgl_backend.layers.norm import Normed, RMSNorm
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import Place, ReadTensor, StoredTensor, empty_parameter
from minisgl_backend.models.decoder_layers import residual_norm
from minisgl_backend.models.spec import EagleSpec, ModelSpec
from minisgl_backend.models.token_mixing import SelfAttention, StepContext
from minisgl_backend.parallel.group import Group


class EagleLayer(nn.Module):
    """The layer (``mtp.GuessingLayer``). The ranks split the inputs of the projection that makes
    its hidden states."""

    def __init__(self, spec: ModelSpec, eagle: EagleSpec, group: Group, matrices: Matrices):
        """``spec`` is the model with the layer."""
        super().__init__()
        own, matrices = eagle.layer, matrices.of_plain()
        self.read_layers = eagle.read_layers_in(spec.num_layers)
        self.state_size = own.hidden_size
        self._norm_before_residual = eagle.norm_before_residual
        self._norm_output = eagle.norm_output
        num_inputs = len(self.read_layers) * spec.hidden_size
        self.input_norm = RMSNorm(num_inputs, own.norms.eps) if eagle.norm_before_fc else None
        self.fc_norm: nn.ModuleList | None = None
        if eagle.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(spec.hidden_size, own.norms.eps) for _ in self.read_layers
            )
        self.fc = RowLinear(
            "fc", num_inputs, own.hidden_size, bias=False, group=group, matrices=matrices
        )
        self.midlayer = _MidLayer(spec, own, group, matrices)
        self.model = _Body(eagle, group, matrices)
        self.lm_head = OutputHead(
            "lm_head", eagle.num_drafted, own.hidden_size, group=group, matrices=matrices
        )
        self.d2t = DraftedTokens(eagle.num_drafted, spec.vocab_size)

    @property
    def embedding(self) -> VocabEmbedding | None:
        return self.model.embed_tokens

    @property
    def outside_kernels(self) -> nn.Module:
        return self

    def first_states(self, layer_input: Tensor, norm: RMSNorm) -> Tensor:
        x = Normed(layer_input, self.input_norm).normalized(pdl=False)
        if self.fc_norm is not None:
            parts = zip(x.tensor_split(len(self.read_layers), dim=1), self.fc_norm, strict=True)
            x = torch.cat(
                [Normed(part, cast(RMSNorm, of)).normalized(pdl=False) for part, of in parts], dim=1
            )
        ins = self.fc.matrix.ins
        states: Tensor = self.fc(Normed(x[:, ins.start : ins.end].contiguous()), pdl=False)
        return states

    def states(self, embedded: Tensor, states: Tensor, step: StepContext) -> Tensor:
        layer, pdl = self.midlayer, step.pdl
        states.nan_to_num_()
        normed = Normed(states, layer.hidden_norm).normalized(pdl=pdl)
        joined = torch.cat(
            [Normed(embedded, layer.input_layernorm).normalized(pdl=pdl), normed], dim=1
        )
        residual: Tensor = normed if self._norm_before_residual else states
        step = replace(step, query_scale=layer.query_scale)
        residual, x = layer.self_attn(
            residual, Normed(joined), layer.post_attention_layernorm, step
        )
        residual, x = layer.mlp(residual, x, self.model.norm, pdl=pdl)
        return x.normalized(pdl=pdl) if self._norm_output else residual

    def best_tokens(self, states: Tensor, head: OutputHead) -> Tensor:
        own = self.lm_head
        x = Normed(states, None if self._norm_output else self.model.norm)
        logits = own.gathered(own.part(x))
        return self.d2t.tokens.index_select(0, logits.argmax(dim=-1))

    def pack(self) -> None:
        """Arrange the weights for GEMMs (``Decoder.pack``)."""
        for part in (self.fc, self.midlayer, self.lm_head):
            pack_matrices(part)


class _MidLayer(nn.Module):
    """The decoder layer, whose attention also takes the embedding."""

    def __init__(self, spec: ModelSpec, own: ModelSpec, group: Group, matrices: Matrices):
        super().__init__()
        self.input_layernorm = residual_norm(own)
        self.hidden_norm = residual_norm(own)
        self.self_attn = SelfAttention(
            own,
            0,
            group,
            matrices,
            in_features=2 * own.hidden_size,
            place=len(spec.attention_layers) - 1,
        )
        self.post_attention_layernorm = residual_norm(own)
        assert own.gate is not None
        self.mlp = GatedMLP(
            "midlayer.mlp",
            own.hidden_size,
            own.intermediate_size,
            bias=own.biases.mlp,
            group=group,
            matrices=matrices,
            gate=own.gate,
        )
        shared, scale = spec.attention_shape(group.size).scale, own.attention_shape().scale
        self.query_scale = None if scale == shared else scale / shared
        """By what queries are multiplied, as attention scales the scores of all layers alike."""


class _Body(nn.Module):
    """The modules whose names for the loader begin with ``model.``."""

    def __init__(self, eagle: EagleSpec, group: Group, matrices: Matrices):
        super().__init__()
        own = eagle.layer
        self.embed_tokens: VocabEmbedding | None = None
        if eagle.own_embedding:
            self.embed_tokens = VocabEmbedding(
                "model.embed_tokens",
                own.vocab_size,
                own.hidden_size,
                group=group,
                matrices=matrices,
            )
        self.norm = residual_norm(own)


class DraftedTokens(nn.Module):
    """The token of each row of the output head: ``tokens`` int32[num_drafted]. A checkpoint has
    offsets, token less row; it may leave them out if the head has all tokens."""

    def __init__(self, num_drafted: int, vocab_size: int):
        super().__init__()
        self._vocab_size = vocab_size
        self.tokens = empty_parameter(num_drafted, dtype=torch.int32)

    def reset(self) -> None:
        """Let row i be token i."""
        self.tokens.data.copy_(torch.arange(len(self.tokens)))

    def places(self) -> Iterator[tuple[str, Place]]:
        yield "offsets", _OffsetsPlace(self.tokens.data, self._vocab_size)


class _OffsetsPlace:
    """Where the offsets go (``Place``)."""

    def __init__(self, tokens: Tensor, vocab_size: int):
        self._tokens = tokens
        self._vocab_size = vocab_size

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._tokens.shape)

    @property
    def device(self) -> torch.device:
        return self._tokens.device

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        stored = StoredTensor(
            names=("offsets",),
            shapes=(self.shape,),
            dtypes=("I64", "I32"),
            optional=len(self._tokens) == self._vocab_size,
        )
        return {"offsets": stored}

    def fill(self, found: Mapping[str, ReadTensor]) -> None:
        read = found["offsets"]
        tokens = read.values.long() + torch.arange(len(read.values))
        wrong = ((tokens < 0) | (tokens >= self._vocab_size)).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ConfigError(
                f"{read.name} makes row {row} of the output head token {int(tokens[row])}, and the "
                f"model has {self._vocab_size}"
            )
        self._tokens.copy_(tokens)

    def draw(self, whole: Tensor) -> None:
        """Leave the tokens as ``reset`` has set them."""
