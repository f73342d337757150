"""The decoder that all supported architectures share, on every device.

Tokens of all rows of a step go through it as one flat batch, [num_tokens, hidden_size]; only token
mixing tells rows apart. Modules have the names of the checkpoint's tensors, from which the loader
finds their places. The residual stream is one tensor, updated in place if a kernel can.

Each step has one form (``layers.gemm.Form``), chosen by its number of tokens: which kernels compute
its layers, and what these fuse. All forms give the same values within rounding. Nothing here waits
for a GPU or depends on values there, so all of it may be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minisgl_backend.attention.base import PagedKV
from minisgl_backend.kernels.rms_norm import rms_norm
from minisgl_backend.kernels.small_batch import MAX_BATCH_SIZE, small_batch_linear
from minisgl_backend.layers.embedding import VocabEmbedding
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.layers.gemm import DenseMatrix, Form, Launch, Normed
from minisgl_backend.layers.linear import MakeMatrix
from minisgl_backend.layers.mlp import GatedMLP
from minisgl_backend.layers.norm import RMSNorm
from minisgl_backend.layers.rope import rotary_table
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import Attend, StepContext, TokenMixer, token_mixer
from minisgl_backend.parallel.group import Group

_PDL_HIDDEN_SIZE: Final = 2048
_PDL_TOKENS: Final = 256
"""Up to these sizes kernels are so short that starting them early (PDL) pays."""


class FeedForward(Protocol):
    """The part of a layer that computes each token independently."""

    def __call__(
        self, residual: Tensor, x: Normed, norm: RMSNorm, launch: Launch
    ) -> tuple[Tensor, Normed]:
        """The residual stream [num_tokens, hidden_size] after this part of the layer, and under
        ``norm``. ``x`` is its input under the layer's second norm; ``residual`` may be overwritten.
        """


class DecoderLayer(nn.Module):
    """Token mixing and feed-forward, each on the normalized residual stream and added to it."""

    def __init__(
        self, spec: ModelSpec, layer: int, group: Group, make: MakeMatrix, fused_experts: bool
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self._mixer_name, mixer = token_mixer(spec, layer, group, make)
        self.add_module(self._mixer_name, mixer)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = _feed_forward(spec, layer, group, make, fused_experts)

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
        return feed_forward(residual, x, next_norm, step.launch)


class _Body(nn.Module):
    """The modules whose names in the checkpoint begin with ``model.``."""

    def __init__(self, spec: ModelSpec, group: Group, make: MakeMatrix, fused_experts: bool):
        super().__init__()
        self.embed_tokens = VocabEmbedding(spec.vocab_size, spec.hidden_size, group)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, layer, group, make, fused_experts)
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
        fused: bool = False,
        fused_experts: bool = False,
        make: MakeMatrix = DenseMatrix.of,
    ):
        """``fused``: computed by this package's kernels, else by PyTorch, operation by operation;
        ``fused_experts`` says the same of experts. ``make`` makes the linear layers' matrices."""
        super().__init__()
        self.spec = spec
        self.group = group
        self.model = _Body(spec, group, make, fused_experts)
        if not spec.tie_embeddings:
            self.lm_head = VocabEmbedding(spec.vocab_size, spec.hidden_size, group)
        self.most_tensor_core_tokens = 0
        self.mark: Callable[[str], AbstractContextManager[object]] | None = None
        """Put around each layer, for profilers."""
        self._fused = fused

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def layers(self) -> list[DecoderLayer]:
        return cast("list[DecoderLayer]", list(self.model.layers))

    @property
    def head(self) -> VocabEmbedding:
        """The output head, which may be the embedding."""
        return self.model.embed_tokens if self.spec.tie_embeddings else self.lm_head

    def set_positions(self, num_positions: int, device: torch.device) -> None:
        """Compute the rotary table for sequences of up to ``num_positions`` tokens."""
        self.rotary_table = rotary_table(self.spec.rope, self.spec.head_dim, num_positions, device)

    def bind_pages(self, pages: Sequence[PagedKV]) -> None:
        """Give each layer the pages of its keys and values."""
        for layer, kv in zip(self.layers, pages, strict=True):
            layer.mixer.bind(kv)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """The residual stream after the last layer, [num_tokens, hidden_size], not normalized.

        ``tokens``, ``positions`` and ``slots`` are int32 or int64 [num_tokens].
        """
        residual: Tensor = self.model.embed_tokens(tokens)  # [num_tokens, hidden_size]
        layers, launch = self.layers, self._launch(len(tokens))
        step = StepContext(positions, slots, self.rotary_table, attend, launch)
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
        norm, head = self.model.norm, self.head
        if self._fused and len(hidden) <= MAX_BATCH_SIZE:
            logits = small_batch_linear(hidden, head.weight, norm_weight=norm.weight, eps=norm.eps)
            return head.gather(logits, out)
        normalized = rms_norm(hidden, norm.weight, norm.eps)
        if out is not None and self.group.size == 1:
            return torch.mm(normalized, head.weight.t(), out=out)
        return head.gather(F.linear(normalized, head.weight), out)

    def launches_early(self, num_tokens: int) -> bool:
        """Whether decode attention is launched to start before its predecessor ends, in captured
        steps of this number of tokens."""
        launch = self._launch(num_tokens)
        if launch.form is Form.TENSOR_CORE:
            return self.group.size == 1 or self._sums_are_fused(num_tokens)
        return launch.pdl

    def _launch(self, num_tokens: int) -> Launch:
        if not self._fused:
            return Launch(Form.PLAIN)
        if num_tokens <= self.most_tensor_core_tokens:
            return Launch(Form.TENSOR_CORE, pdl=True)
        if num_tokens <= MAX_BATCH_SIZE and not self._sums_are_fused(num_tokens):
            return Launch(Form.SMALL, pdl=self._gains_early and num_tokens == 1)
        return Launch(Form.WIDE, pdl=self._gains_early and num_tokens <= _PDL_TOKENS)

    @property
    def _gains_early(self) -> bool:
        """Whether kernels of the small and wide forms may start early, and gain by it on an H200.

        With several ranks they must not: the ranks' fused sums read the residual stream before they
        wait, and only the GEMMs on tensor cores ensure that it is written by then.
        """
        return self.group.size == 1 and self.spec.hidden_size <= _PDL_HIDDEN_SIZE

    def _sums_are_fused(self, num_tokens: int) -> bool:
        fused = self.group.fused
        return fused is not None and fused.fits(num_tokens, self.spec.hidden_size, self.dtype)


def _feed_forward(
    spec: ModelSpec, layer: int, group: Group, make: MakeMatrix, fused_experts: bool
) -> GatedMLP | ExpertsMLP:
    moe = spec.moe
    if moe is None or layer not in moe.layers:
        return GatedMLP(
            f"model.layers.{layer}.mlp",
            spec.hidden_size,
            spec.intermediate_size,
            bias=spec.mlp_bias,
            group=group,
            make=make,
        )
    return ExpertsMLP(
        spec.hidden_size,
        moe.intermediate_size,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        normalize=moe.normalize,
        fused=fused_experts,
        group=group,
    )
