"""Tiny EAGLE-3 layers for tiny models, in the publishers' layouts, and what they compute in plain
PyTorch."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.conformance.checkpoints import CASES, draw

NUM_LAYERS: Final = 8
"""Of the models: with fewer, the layers that are read by default would not differ."""
_SEED: Final = 60
_PREDICTABLE: Final = 1e-4
"""What a layer adds to the residual stream of a predictable model, compared to a random one's."""
_THETA: Final = 5000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A layer, and how its publisher writes it. ``hidden_size`` and ``heads`` are the model's
    unless given. ``read_layers``: those before which the residual stream is read; None: those by
    default, which config.json does not name."""

    num_drafted: int
    hidden_size: int | None = None
    heads: tuple[int, int, int] | None = None
    speculators: bool = False
    read_layers: tuple[int, ...] | None = None
    own_embedding: bool = False
    biased: bool = False
    head_norms: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        "default": Form(num_drafted=200),
        "named": Form(num_drafted=100, read_layers=(1, 4, 6), own_embedding=True, heads=(2, 1, 48)),
        "speculators": Form(
            num_drafted=256,
            speculators=True,
            read_layers=(0, 3, 8),
            heads=(4, 4, 16),
            biased=True,
            norm_before_residual=True,
            norm_before_fc=True,
        ),
        "narrow": Form(
            num_drafted=90, hidden_size=48, read_layers=(5,), heads=(3, 1, 32), own_embedding=True
        ),
        "3.1": Form(num_drafted=150, read_layers=(1, 6), fc_norm=True, norm_output=True),
        "head-norms": Form(
            num_drafted=180,
            speculators=True,
            head_norms=True,
            own_embedding=True,
            norm_before_residual=True,
        ),
    }
)
PREDICTABLE: Final = Form(
    num_drafted=200, heads=(4, 4, 16), biased=True, norm_before_residual=True, own_embedding=True
)
"""The form of predictable layers."""


class EagleReference(nn.Module):
    """``model``, of transformers, and an EAGLE-3 layer; the module has the layer's parameters, by
    their published names."""

    def __init__(self, model: Any, form: Form):
        super().__init__()
        self.models = (model,)  # not its parameters
        config, self.form = model.config.get_text_config(), form
        self.target_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.size = form.hidden_size or self.target_size
        own = config.num_attention_heads, config.num_key_value_heads, _head_dim(config)
        self.heads = form.heads or own
        num_heads, num_kv_heads, head_dim = self.heads
        self.read_layers = form.read_layers or (2, NUM_LAYERS // 2, NUM_LAYERS - 3)
        size, inner = self.size, 80
        layer: Any = nn.Module()
        layer.input_layernorm, layer.hidden_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        layer.post_attention_layernorm = nn.RMSNorm(size)
        attention: Any = nn.Module()
        layer.self_attn = attention
        for name, count in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            projection = nn.Linear(2 * size, count * head_dim, bias=form.biased)
            attention.add_module(f"{name}_proj", projection)
        attention.o_proj = nn.Linear(num_heads * head_dim, size, bias=form.biased)
        if form.head_norms:
            attention.q_norm, attention.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        layer.mlp = nn.Module()
        for name in ("gate_proj", "up_proj"):
            layer.mlp.add_module(name, nn.Linear(size, inner, bias=False))
        layer.mlp.down_proj = nn.Linear(inner, size, bias=False)
        self.midlayer: Any = layer
        self.norm = nn.RMSNorm(size)
        num_inputs = len(self.read_layers) * self.target_size
        self.fc = nn.Linear(num_inputs, size, bias=False)
        if form.norm_before_fc:
            self.input_norm = nn.RMSNorm(num_inputs)
        if form.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(self.target_size) for _ in self.read_layers)
        self.lm_head = nn.Linear(size, form.num_drafted, bias=False)
        if form.own_embedding:
            self.embed_tokens = nn.Embedding(self.vocab_size, size)
        generator = torch.Generator().manual_seed(_SEED)
        drafted = torch.randperm(self.vocab_size, generator=generator)[: form.num_drafted]
        self.drafted = drafted.sort().values
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.eps = 1e-6

    @property
    def model(self) -> Any:
        return self.models[0]

    def streams_of(self, tokens: Tensor) -> Tensor:
        """What the layer reads of the model's residual stream, [num_tokens, read layers x size]."""
        decoder, found = self.model.get_decoder(), dict[int, Tensor]()

        def keep(index: int) -> Any:
            def hook(_module: nn.Module, given: Any, by_name: Any) -> None:
                stream = given[0] if given else by_name["hidden_states"]
                found[index] = stream[0].clone()

            return hook

        modules = [*decoder.layers, decoder.norm]
        handles = [
            module.register_forward_pre_hook(keep(index), with_kwargs=True)
            for index, module in enumerate(modules)
        ]
        decoder(tokens[None])
        for handle in handles:
            handle.remove()
        return torch.cat([found[index] for index in self.read_layers], dim=-1)

    def first_states(self, streams: Tensor) -> Tensor:
        if self.form.norm_before_fc:
            streams = self.input_norm(streams)
        if self.form.fc_norm:
            parts = zip(
                streams.tensor_split(len(self.read_layers), dim=-1), self.fc_norm, strict=True
            )
            streams = torch.cat([norm(part) for part, norm in parts], dim=-1)
        states: Tensor = self.fc(streams)
        return states

    def states(self, after: Tensor, hidden: Tensor) -> Tensor:
        """The layer's states after positions 0, 1, ..., of which ``hidden`` are the states
        and ``after`` [num_tokens] the tokens after each."""
        layer = self.midlayer
        embedding = self.model.get_input_embeddings().weight
        if self.form.own_embedding:
            embedding = self.embed_tokens.weight
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embedding[after]), normed], dim=-1)
        residual = normed if self.form.norm_before_residual else hidden
        residual = residual + self._attention(x)
        x = layer.post_attention_layernorm(residual)
        mlp = layer.mlp
        x = nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
        out: Tensor = residual + mlp.down_proj(x)
        return self.normed(out) if self.form.norm_output else out

    def normed(self, residual: Tensor) -> Tensor:
        out: Tensor = self.norm(residual)
        return out

    def best(self, state: Tensor) -> int:
        output = state if self.form.norm_output else self.normed(state)
        return int(self.drafted[self.lm_head(output).argmax()])

    def guesses(self, tokens: Tensor, count: int) -> tuple[list[int], Tensor]:
        """The ``count`` likeliest tokens after ``tokens``, each after those before it; and the
        states of all positions by which they were found."""
        hidden, after = self.first_states(self.streams_of(tokens[:-1])), tokens[1:]
        found: list[int] = []
        while True:
            states = self.states(after, hidden)
            found.append(self.best(states[-1]))
            if len(found) == count:
                return found, states
            hidden = torch.cat([hidden, states[-1:]])
            after = torch.cat([after, torch.tensor(found[-1:])])

    def _attention(self, x: Tensor) -> Tensor:
        attention, (num_heads, num_kv_heads, head_dim) = self.midlayer.self_attn, self.heads
        length = len(x)
        q = attention.q_proj(x).view(length, num_heads, head_dim)
        k = attention.k_proj(x).view(length, num_kv_heads, head_dim)
        v = attention.v_proj(x).view(length, num_kv_heads, head_dim)
        if self.form.head_norms:
            q, k = attention.q_norm(q), attention.k_norm(k)
        q, k = _rotated(q), _rotated(k)
        group = num_heads // num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
        scores = scores + torch.full((length, length), float("-inf")).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)
        out: Tensor = attention.o_proj(mixed.reshape(length, -1))
        return out


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = _THETA ** -(torch.arange(half) / half)
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


@torch.no_grad()
def write_eagle_checkpoint(
    case: str, folder: Path, form: Form, *, predictable: bool = False
) -> EagleReference:
    """Make the model of ``case`` in ``folder / "model"`` and a layer for it in ``folder /
    "eagle"``; returns the reference.

    A ``predictable`` layer, which is of the form ``PREDICTABLE``, is nearly always right about
    tokens that it has. The layers of such a model add little to the residual stream, so that the
    next token depends on the last one alone (``mtp_checkpoints``). Biases of queries and keys let
    the layer see little but its own position, where it copies the embedding of the token after.
    """
    model = _with_layers(CASES[case]())
    draw(model, _SEED)
    if predictable:
        for name, parameter in model.get_decoder().named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                parameter.mul_(_PREDICTABLE)
    reference = EagleReference(model, form)
    draw(reference, _SEED + 1)  # type: ignore[arg-type]
    if predictable:
        _make_predictable(reference)
    model.eval().save_pretrained(folder / "model")
    (folder / "eagle").mkdir()
    _write_layer(folder / "eagle", reference)
    return reference.eval()


def _with_layers(model: Any) -> Any:
    """The same model with more layers."""
    config = copy.deepcopy(model.config)
    times = NUM_LAYERS // config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers *= times
    if kinds is not None:
        config.layer_types = list(kinds) * times
    return type(model)(config)


def _make_predictable(reference: EagleReference) -> None:
    layer, model, size = reference.midlayer, reference.model, reference.size
    attention = layer.self_attn
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        projection = getattr(attention, name)
        projection.weight.zero_()
        projection.bias.fill_(8.0 if name in ("q_proj", "k_proj") else 0.0)
    attention.v_proj.weight[:, :size] = torch.eye(size)
    attention.o_proj.weight.copy_(100 * torch.eye(size))
    layer.mlp.down_proj.weight.mul_(_PREDICTABLE)
    layer.input_layernorm.weight.fill_(1.0)
    layer.hidden_norm.weight.mul_(_PREDICTABLE)
    reference.norm.weight.copy_(model.get_decoder().norm.weight)
    reference.embed_tokens.weight.copy_(model.get_input_embeddings().weight)
    reference.lm_head.weight.copy_(model.get_output_embeddings().weight[reference.drafted])


def _write_layer(folder: Path, reference: EagleReference) -> None:
    form = reference.form
    tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    if form.speculators:
        tensors = {name.replace("midlayer.", "layers.0."): tensors[name] for name in tensors}
    size = reference.vocab_size
    if form.num_drafted < size:
        tensors["d2t"] = reference.drafted - torch.arange(form.num_drafted)
        tensors["t2d"] = torch.isin(torch.arange(size), reference.drafted)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(reference)))


def config_of(reference: EagleReference) -> dict[str, Any]:
    """The layer's config.json."""
    form, (num_heads, num_kv_heads, head_dim) = reference.form, reference.heads
    kind = "qwen3" if form.head_norms else "llama"
    layer: dict[str, Any] = {
        "model_type": kind,
        "attention_bias": form.biased,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": reference.size,
        "intermediate_size": reference.midlayer.mlp.down_proj.in_features,
        "max_position_embeddings": 128,
        "num_attention_heads": num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": num_kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": _THETA,
        "vocab_size": reference.vocab_size,
    }
    flags = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    common = {
        "draft_vocab_size": form.num_drafted,
        "target_hidden_size": reference.target_size,
        **{key: getattr(form, key) for key in flags},
    }
    if form.speculators:
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "eagle_aux_hidden_state_layer_ids": form.read_layers and list(form.read_layers),
            **common,
        }
    read: dict[str, Any] = {}
    if form.read_layers is not None:  # named by the layers whose outputs they are
        ids = [layer - 1 for layer in form.read_layers]
        read = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    return {"architectures": ["LlamaForCausalLMEagle3"], **layer, **common, **read}
