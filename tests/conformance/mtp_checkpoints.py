"""Tiny checkpoints with an MTP layer in the publishers' layouts, and what it computes in plain
PyTorch.

transformers writes no MTP layers. So the layer is a copy of one of the model's, with values of its
own.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.conformance.checkpoints import CASES, draw

BESIDE: Final = ("qwen3.5", "qwen3.5-multimodal", "qwen3.5-experts", "qwen3-next")
"""Cases of ``checkpoints`` whose publisher names the layer ``mtp``."""
BEHIND: Final = (
    "glm4-moe",
    "glm4-moe-lite",
    "deepseek-v3",
    "hy-v3",
    "deepseek-v32",
    "bailing-hybrid",
)
"""Cases whose publishers name the layer as one more of the others."""
_SEED: Final = 50
_PREDICTABLE: Final = 1e-4
"""What a layer adds to the residual stream of a predictable model, compared to a random one's."""


class MTPReference(nn.Module):
    """``model``, of transformers, and its MTP layer; the module has the layer's parameters."""

    def __init__(self, model: Any):
        super().__init__()
        self.models = (model,)  # not its parameters
        layers = model.get_decoder().layers
        self.layer = copy.deepcopy([one for one in layers if hasattr(one, "self_attn")][-1])
        norm = self.layer.input_layernorm
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(norm) for _ in range(3))
        size = len(norm.weight)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    @property
    def model(self) -> Any:
        return self.models[0]

    def hidden_of(self, tokens: Tensor) -> Tensor:
        """The model's normalized hidden states of ``tokens`` [num_tokens]."""
        hidden: Tensor = self.model.get_decoder()(tokens[None]).last_hidden_state[0]
        return hidden

    def states(self, after: Tensor, hidden: Tensor) -> Tensor:
        """The layer's normalized hidden states of positions 0, 1, ..., of which ``hidden`` are the
        states and ``after`` [num_tokens] the tokens after each."""
        embedded = self.model.get_input_embeddings()(after)
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))[None]
        positions = torch.arange(len(after))[None]
        mask = torch.full((len(after), len(after)), float("-inf")).triu(1)[None, None]
        in_grids = positions
        if self.model.config.model_type.startswith("qwen3_5"):  # height and width, too
            in_grids = positions.expand(3, 1, -1)
        rotation = self.model.get_decoder().rotary_emb(x, in_grids)
        x = self.layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        states: Tensor = self.norm(x[0])
        return states

    def guesses(self, tokens: Tensor, count: int) -> tuple[list[int], Tensor]:
        """The ``count`` likeliest tokens after ``tokens``, each after those before it; and the
        states of all positions by which they were found."""
        hidden, after = self.hidden_of(tokens[:-1]), tokens[1:]
        found: list[int] = []
        while True:
            states = self.states(after, hidden)
            found.append(int(self.model.get_output_embeddings()(states[-1]).argmax()))
            if len(found) == count:
                return found, states
            hidden = torch.cat([hidden, states[-1:]])
            after = torch.cat([after, torch.tensor(found[-1:])])


@torch.no_grad()
def write_mtp_checkpoint(case: str, folder: Path, *, predictable: bool = False) -> MTPReference:
    """Make the model of ``case`` with an MTP layer, and save it; returns the reference.

    The layer of a ``predictable`` model is nearly always right. The layers of such a model add
    little to the residual stream, so that the next token depends on the last one alone: the logits
    are nearly those of the final norm of its embedding. The MTP layer projects the embedding of the
    token after a position, under a norm without weights, to itself, and drops the hidden state. So
    the final norm, which has the same weights, and the output head see what the model's will see
    after that token.
    """
    model: Any = CASES[case]()
    reference = MTPReference(model)
    draw(model, _SEED)
    draw(reference, _SEED + 1)  # type: ignore[arg-type]
    layers = model.get_decoder().layers
    num_layers = len(layers)
    if predictable:
        _make_predictable(reference, len(reference.eh_proj.weight))
    layers.append(reference.layer)  # transformers knows how to name its tensors
    model.eval()
    model.save_pretrained(folder)
    del layers[num_layers]
    _move_layer(folder / "model.safetensors", num_layers, reference, beside=case in BESIDE)
    return reference.eval()


class GuessingReference(Protocol):
    """A reference of a layer that guesses."""

    def guesses(self, tokens: Tensor, count: int) -> tuple[list[int], Tensor]:
        """The ``count`` tokens that it guesses after ``tokens``, and its states."""


def reference_guesses(theirs: GuessingReference, tokens: list[int], count: int) -> list[int]:
    """The ``count`` tokens that the layer guesses after ``tokens``."""
    with torch.no_grad():
        return theirs.guesses(torch.tensor(tokens), count)[0]


def _make_predictable(reference: MTPReference, size: int) -> None:
    for module in (reference.model.get_decoder(), reference.layer):
        for name, parameter in module.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                parameter.mul_(_PREDICTABLE)
    reference.eh_proj.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
    reference.norm.weight.copy_(reference.model.get_decoder().norm.weight)
    reference.enorm.weight.zero_()
    reference.enorm.weight += 1.0 - reference.enorm(torch.ones(1, size))[0]  # some models add 1


def _move_layer(path: Path, num_layers: int, reference: MTPReference, *, beside: bool) -> None:
    """Give the tensors of the layer behind the last one the publisher's names, and add those that
    are not part of other layers."""
    layer, tensors = f"layers.{num_layers}.", {}
    for name, tensor in load_file(path).items():
        _, within, part = name.partition(layer)
        tensors[f"mtp.layers.0.{part}" if beside and within else name] = tensor
    ours = {"enorm": reference.enorm, "hnorm": reference.hnorm, "norm": reference.norm}
    if beside:
        theirs = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "norm": "norm"}
        theirs = {name: f"mtp.{there}" for name, there in theirs.items()} | {"eh_proj": "mtp.fc"}
    else:
        around = f"model.{layer}"
        final = "final_layernorm" if _has_own_norm(reference) else "shared_head.norm"
        names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": final}
        theirs = {name: around + there for name, there in names.items()}
        if final == "shared_head.norm":  # copies of others, which nothing reads
            head = reference.model.get_output_embeddings().weight
            tensors[f"{around}embed_tokens.weight"] = torch.zeros_like(head)
            tensors[f"{around}shared_head.head.weight"] = torch.zeros_like(head)
    for name, module in {**ours, "eh_proj": reference.eh_proj}.items():
        tensors[f"{theirs[name]}.weight"] = module.weight.detach().contiguous()
    save_file(tensors, path, {"format": "pt"})


def _has_own_norm(reference: MTPReference) -> bool:
    """Whether the publisher has another name for the layer's final norm (Hy3, Ling 3.0)."""
    return reference.model.config.model_type in ("hy_v3", "bailing_hybrid")
