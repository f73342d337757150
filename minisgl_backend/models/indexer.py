"""The indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): a part of latent
attention that chooses which positions the tokens of a layer attend to.

Knows the names of the checkpoint. Each rank has the whole indexer, so that all choose the same.
Must not know which page is whose, or how scores are computed (``kernels.indexer``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from minisgl_backend.attention.base import AttendExpanded
from minisgl_backend.attention.sparse import AttendChosen
from minisgl_backend.kernels.indexer import rope_store_index
from minisgl_backend.layers.linear import MergedColumnLinear
from minisgl_backend.layers.norm import Normed
from minisgl_backend.layers.quantized_matrix import Matrices
from minisgl_backend.layers.weight_place import Place, Share, collect_places, empty_parameter, whole
from minisgl_backend.models.latent_spec import IndexerSpec
from minisgl_backend.models.token_mixing import StepContext


class Indexer(nn.Module):
    """Stores index keys and chooses positions. ``k_norm`` and ``k_norm_bias`` [key_dim] are the
    LayerNorm of keys."""

    def __init__(
        self, spec: IndexerSpec, name: str, query_rank: int, hidden_size: int, matrices: Matrices
    ):
        super().__init__()
        self.spec = spec
        sizes = {
            "wq_b": (query_rank, spec.num_heads * spec.key_dim),
            "wk": (hidden_size, spec.key_dim),
            "weights_proj": (hidden_size, spec.num_heads),
        }
        self.wq_b, self.wk, self.weights_proj = (
            MergedColumnLinear(
                name, in_features, {part: Share(size, 0, size)}, bias=False, matrices=matrices
            )
            for part, (in_features, size) in sizes.items()
        )
        self.k_norm = empty_parameter(spec.key_dim)
        self.k_norm_bias = empty_parameter(spec.key_dim)

    def places(self) -> Iterator[tuple[str, Place]]:
        for name, child in self.named_children():
            yield from collect_places(child, name).items()
        yield "k_norm.weight", whole(self.k_norm, neutral=1.0)
        yield "k_norm.bias", whole(self.k_norm_bias, neutral=0.0)

    def forward(
        self, x: Normed, query_latents: Tensor, index_keys: Tensor, step: StepContext
    ) -> None:
        """Store the ``index_keys`` of the layer's tokens, and choose positions if the step needs
        that. ``query_latents`` [num_tokens, query_rank] are normalized."""
        pdl = step.pdl
        q = self.wq_b(Normed(query_latents), pdl=pdl)
        q = q.view(len(q), self.spec.num_heads, self.spec.key_dim)
        rope_store_index(
            q,
            self.wk(x, pdl=pdl),
            replace(step.places, interleaved=self.spec.interleaved),
            index_keys,
            norm_weight=self.k_norm,
            norm_bias=self.k_norm_bias,
            eps=self.spec.norm_eps,
            rotates_last=self.spec.rotates_last,
            pdl=pdl,
        )
        chooses = step.attend.rows if isinstance(step.attend, AttendExpanded) else step.attend
        if isinstance(chooses, AttendChosen):
            # a factor that all scores have would change no choice, so it is left out
            chooses.choose(q, self.weights_proj(x, pdl=pdl), index_keys)
