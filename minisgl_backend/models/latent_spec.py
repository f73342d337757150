"""Multi-head latent attention, and the indexer that may come with it, in plain numbers.

Must not know config.json, tensors or the rest of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_backend.attention.base import ExpandedHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv 2512.02556): tokens attend to the ``top_k``
    positions with the highest scores (``kernels.indexer``).

    A token has ``num_heads`` index queries of ``key_dim`` numbers, which are made of its latent of
    queries. The first numbers rotate, or with ``rotates_last`` the last, as many as those of
    attention, by halves unless ``interleaved``. Keys have a LayerNorm, with ``norm_eps``.
    ``layers`` choose positions; each other layer takes those that the last one
    before it chose (IndexCache, arXiv 2603.12201).
    """

    num_heads: int
    key_dim: int
    top_k: int
    layers: frozenset[int]
    interleaved: bool = False
    rotates_last: bool = False
    norm_eps: float = 1e-6

    def num_parameters(self, query_rank: int, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        of_tokens = (self.key_dim + self.num_heads) * hidden_size
        return of_tokens + self.num_heads * self.key_dim * query_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Each position has a latent of ``latent_dim`` numbers, of which all heads make their keys and
    values, and one rotated key of ``rope_dim`` numbers for all heads. A head's query has
    ``nope_dim`` numbers that do not rotate and ``rope_dim`` that do; its value has ``value_dim``.
    With a ``query_rank`` queries are made of a latent, too, which has this size. Both latents are
    normalized, with ``norm_eps``. Only models with a ``query_rank`` have an ``indexer``.
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6
    indexer: IndexerSpec | None = None

    @property
    def query_dim(self) -> int:
        """The size of a head's query, as the projection gives it."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """The numbers of a position in a page."""
        return self.latent_dim + self.rope_dim

    @property
    def expanded(self) -> ExpandedHeads:
        """The keys and values of heads that are made of a latent."""
        return ExpandedHeads(self.query_dim, self.value_dim)

    def num_parameters(self, num_heads: int, hidden_size: int) -> int:
        """Number of weights of a layer's projections."""
        queries, rank = num_heads * self.query_dim, self.query_rank
        of_queries = hidden_size * queries
        if rank is not None:
            of_queries = rank * (hidden_size + queries)
        of_heads = num_heads * (self.nope_dim + self.value_dim) * self.latent_dim
        outputs = num_heads * self.value_dim * hidden_size
        return of_queries + hidden_size * self.key_dim + of_heads + outputs
