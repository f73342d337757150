"""The decoder that all supported architectures share, on every device.

Tokens of all rows of a step go through it as one flat batch, [num_tokens, hidden_size]; only token
mixing tells rows apart. Modules have the names of the checkpoint's tensors, from which the loader
finds their places. The residual stream is one tensor, updated in place if a kernel can.

Each matrix chooses its kernel by the number of tokens (``layers.matrix``); all kernels give the
same values within rounding. Nothing here waits for a GPU or depends on values there, so all of
it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor, nn

from minisgl_backend.attention.base import Attend, PagedKV
from minisgl_backend.kernels.dispatch import can_start_early
from minisgl_backend.kernels.rope_store import TokenPlaces
from minisgl_backend.kernels.small_batch import MAX_BATCH_SIZE
from minisgl_backend.layers.embedding import OutputHead, VocabEmbedding
from minisgl_backend.layers.feed_forward import ExpertsMLP, FeedForward, GatedMLP
from minisgl_backend.layers.matrix import Matrix
from minisgl_backend.layers.norm import Normed, RMSNorm, is_sum_fused
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.models.rope import rotary_table
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import SelfAttention, StepContext, TokenMixer, token_mixer
from minisgl_backend.parallel.group import Group

if TYPE_CHECKING:
    from minisgl_backend.kernels.cuda.linear import TensorCores

_PDL_HIDDEN_SIZE: Final = 2048
_PDL_TOKENS: Final = 256
"""Up to these sizes kernels are so short that starting them early (PDL) pays on an H200."""


class DecoderLayer(nn.Module):
    """Token mixing and feed-forward, each on the normalized residual stream and added to it."""

    def __init__(
        self, spec: ModelSpec, layer: int, group: Group, matrices: Matrices, fused_experts: bool
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._mixer_name, mixer = token_mixer(spec, layer, group, matrices)
        self.add_module(self._mixer_name, mixer)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = _feed_forward(spec, layer, group, matrices, fused_experts)

    @property
    def mixer(self) -> TokenMixer:
        """The token mixing, a module by its name in the checkpoint."""
        return cast(TokenMixer, getattr(self, self._mixer_name))

    def forward(
        self, residual: Tensor, x: Normed, next_norm: RMSNorm, step: StepContext
    ) -> tuple[Tensor, Normed]:
        """``x`` is ``residual`` under this layer's norm; so is the result under the next one's."""
        feed_forward: FeedForward = self.mlp
        residual, x = self.mixer(residual, x, self.post_attention_layernorm, step)
        return feed_forward(residual, x, next_norm, pdl=step.pdl)


class _Body(nn.Module):
    """The modules whose names in the checkpoint begin with ``model.``."""

    def __init__(self, spec: ModelSpec, group: Group, matrices: Matrices, fused_experts: bool):
        super().__init__()
        self.embed_tokens = VocabEmbedding(
            "model.embed_tokens", spec.vocab_size, spec.hidden_size, group=group, matrices=matrices
        )
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, group, matrices, fused_experts)
            for layer in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps)


class Decoder(nn.Module):
    """Embedding, layers, final norm and output head.

    ``rotary_table`` is float32[num_positions, head_dim] and no parameter: it is computed, never
    loaded. A forward pass needs pages (``bind_pages``).
    """

    rotary_table: Tensor

    def __init__(
        self,
        spec: ModelSpec,
        group: Group,
        *,
        matrices: Matrices,
        fused_experts: bool,
    ):
        """``matrices`` makes the matrices; ``fused_experts``: computed by this package's kernels,
        else by PyTorch, operation by operation."""
        super().__init__()
        self.spec = spec
        self.group = group
        self.model = _Body(spec, group, matrices, fused_experts)
        if not spec.tie_embeddings:
            self.lm_head = OutputHead(
                "lm_head", spec.vocab_size, spec.hidden_size, group=group, matrices=matrices
            )
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        """Put around each layer, for profilers."""
        self._most_tensor_core_tokens = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.model.layers))

    @property
    def head(self) -> OutputHead:
        """The output head, which may be the embedding."""
        return self.model.embed_tokens if self.spec.tie_embeddings else self.lm_head

    def pack(self) -> None:
        """Arrange the loaded weights for GEMMs: afterwards only these may read them."""
        for layer in self.layers:
            for module in layer.modules():
                if isinstance(module, Matrix):
                    module.pack()
        self.head.matrix.pack(keep=self.spec.tie_embeddings)

    def set_positions(self, num_positions: int, device: torch.device) -> None:
        """Compute the rotary table for sequences of up to ``num_positions`` tokens."""
        self.rotary_table = rotary_table(self.spec.rope, self.spec.head_dim, num_positions, device)

    def bind_pages(self, pages: Sequence[PagedKV]) -> None:
        """Give each layer the pages of its keys and values."""
        for layer, kv in zip(self.layers, pages, strict=True):
            layer.mixer.bind(kv)

    def use_tensor_cores(self, kernels: TensorCores) -> None:
        """Compute steps that fit them by ``kernels``. Only layers whose weights fit them, all of
        the same shapes, each ``SelfAttention`` and ``GatedMLP``; pages must be bound."""
        for layer in self.layers:
            assert isinstance(layer.mixer, SelfAttention) and isinstance(layer.mlp, GatedMLP)
            layer.mixer.use_tensor_cores(kernels)
            layer.mlp.use_tensor_cores(kernels)
        self._most_tensor_core_tokens = kernels.most_tokens

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size], not normalized.

        ``tokens``, ``positions`` and ``slots`` are int32 or int64 [num_tokens].
        """
        residual: Tensor = self.model.embed_tokens(tokens)  # [num_tokens, hidden_size]
        layers, pdl = self.layers, self._starts_early(len(tokens))
        step = StepContext(TokenPlaces(positions, slots, self.rotary_table), attend, pdl)
        x = Normed(residual, layers[0].input_layernorm)
        next_norms = [layer.input_layernorm for layer in layers[1:]] + [self.model.norm]
        for index, (layer, norm) in enumerate(zip(layers, next_norms, strict=True)):
            with nullcontext() if self.mark is None else self.mark(f"layer {index}"):
                residual, x = layer(residual, x, norm, step)
        return residual

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] in the model's dtype.

        ``out``, of that shape, takes the result if that saves memory.
        """
        return self.head.logits(Normed(hidden, self.model.norm), out)

    def attention_starts_early(self, num_tokens: int) -> bool:
        """Whether decode attention may start before its predecessor ends, in captured steps of this
        number of tokens."""
        group, size = self.group, self.spec.hidden_size
        return self._starts_early(num_tokens) and (
            group.size == 1 or is_sum_fused(group, num_tokens, size, self.dtype)
        )

    def _starts_early(self, num_tokens: int) -> bool:
        """Whether kernels of the layers may start early, and gain by it.

        With several ranks only those on tensor cores may: the ranks' fused sums read the residual
        stream before they wait, and no other GEMM ensures that it is written by then.
        """
        if not can_start_early(self.rotary_table.device):
            return False
        if num_tokens <= self._most_tensor_core_tokens:
            return True
        if self.group.size > 1 or self.spec.hidden_size > _PDL_HIDDEN_SIZE:
            return False
        return num_tokens == 1 or MAX_BATCH_SIZE < num_tokens <= _PDL_TOKENS


def _feed_forward(
    spec: ModelSpec, layer: int, group: Group, matrices: Matrices, fused_experts: bool
) -> GatedMLP | ExpertsMLP:
    moe = spec.moe
    if moe is None or layer not in moe.layers:
        return GatedMLP(
            f"model.layers.{layer}.mlp",
            spec.hidden_size,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            group=group,
            matrices=matrices,
        )
    return ExpertsMLP(
        f"model.layers.{layer}.mlp",
        spec.hidden_size,
        moe.intermediate_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        normalize=moe.normalize,
        fused=fused_experts,
        group=group,
        matrices=matrices,
    )
