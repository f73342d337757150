"""The bytes that a decode step must move, to compare its time with that of memory alone.

Weights count once. Of the experts those count that a step's tokens choose if all are equally
likely, as they are with random weights. Keys and values count as far as a layer's window sees.
Of recurrent states, inputs of convolutions are read and written in each step; matrices are read in
each step, and written after every ``WHOLE_EVERY``-th token if kernels do so. Activations do not
count, nor do the few rows of an embedding. Must not know kernels.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from minisgl_backend.layers.embedding import VocabEmbedding
from minisgl_backend.layers.experts import ExpertsMLP
from minisgl_backend.models.decoder import Decoder
from minisgl_backend.models.gated_delta_net import GatedDeltaNet
from minisgl_backend.models.kimi_delta import KimiDeltaAttention
from minisgl_backend.models.latent_attention import LatentAttention
from minisgl_backend.models.mamba import MambaMixer
from minisgl_backend.models.parallel_mixer import ParallelMixer
from minisgl_backend.models.short_conv import ShortConv
from minisgl_backend.models.token_mixing import SelfAttention, TokenMixer
from minisgl_backend.plan import WHOLE_EVERY

_Part = TypeVar("_Part", bound=nn.Module)


def bytes_of_decode(model: Decoder, batch_size: int, context: int) -> int:
    """What this rank moves in a step of ``batch_size`` rows, each with ``context`` tokens. Pages
    and recurrent states must be bound."""
    # of these only rows are read
    skipped = [part for part in _parts(model, VocabEmbedding) if part is not model.head]
    experts = _parts(model, ExpertsMLP)
    elsewhere = {
        _memory(parameter)
        for part in [*skipped, *(layer.memory for layer in experts)]
        for parameter in part.parameters()
    }
    by_memory = {_memory(each): each.nbytes for each in model.parameters()}
    total = sum(num_bytes for memory, num_bytes in by_memory.items() if memory not in elsewhere)
    total += sum(_bytes_of_experts(layer, batch_size) for layer in experts)
    for layer, window in zip(model.layers, model.spec.windows, strict=True):
        total += batch_size * _bytes_of_row(layer.mixer, min(context, window or context))
    return total


def _bytes_of_row(mixer: TokenMixer | None, num_seen: int) -> int:
    """What token mixing reads and writes for a row that sees ``num_seen`` tokens."""
    if mixer is None:
        return 0
    if isinstance(mixer, ParallelMixer):
        both = mixer.attention, mixer.recurrent
        return sum(_bytes_of_row(each, num_seen) for each in both)
    if isinstance(mixer, (GatedDeltaNet, KimiDeltaAttention, MambaMixer, ShortConv)):
        inputs, matrices = mixer.states.conv[0].nbytes, mixer.states.matrices[0].nbytes
        written = matrices // WHOLE_EVERY if _writes_rarely(mixer) else matrices
        return 2 * inputs + matrices + written
    assert isinstance(mixer, (SelfAttention, LatentAttention))
    keys = mixer.kv.keys  # [num_pages + 1, page_size, num_kv_heads, head_dim]
    tensors = 1 if mixer.kv.has_latents else 2
    return tensors * keys.shape[2] * keys.shape[3] * keys.itemsize * num_seen


def _writes_rarely(mixer: TokenMixer) -> bool:
    """Whether a kernel for many rows leaves updates of matrices pending, as
    ``models.kernel_choice`` and the layers choose it on Hopper."""
    if isinstance(mixer, GatedDeltaNet):
        shape = mixer.local
        return shape.key_dim == shape.value_dim == 128 and shape.rate_scale == 1.0
    return isinstance(mixer, MambaMixer)


def _bytes_of_experts(layer: ExpertsMLP, batch_size: int) -> int:
    memory, rule = layer.memory, layer.spec.routing
    held = memory.held.size
    used = held * (1 - (1 - rule.top_k / rule.num_experts) ** batch_size)
    # the expert of all tokens may be one more
    of_all = int(memory.has_shared)
    num_bytes = sum(parameter.nbytes for parameter in memory.parameters())
    return round(num_bytes * (used + of_all) / (held + of_all))


def _parts(model: Decoder, kind: type[_Part]) -> list[_Part]:
    return [module for module in model.modules() if isinstance(module, kind)]


def _memory(parameter: nn.Parameter) -> int:
    """Tells parameters apart that lie in different memory."""
    return parameter.untyped_storage().data_ptr()
