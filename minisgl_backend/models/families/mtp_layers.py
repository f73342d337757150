"""Where checkpoints have an MTP layer, and whether it is one that the decoder knows.

There are two layouts: Qwen's, beside the other layers, and DeepSeek's, as one more of them. Must
not know any particular architecture.
"""

from __future__ import annotations

from minisgl_backend.models.config_json import ConfigReader
from minisgl_backend.models.spec import MTPSpec


def mtp_beside(config: ConfigReader, num_layers: int) -> MTPSpec | str:
    """``ModelSpec.mtp``: the MTP layer as Qwen's checkpoints have it, ``mtp.``, or why it has
    none that is supported. Some that have it do not say so in config.json; then it is offered."""
    reason = _why_not(config, "mtp_num_hidden_layers")
    if not reason and config.flag("mtp_use_dedicated_embeddings"):
        reason = "has an MTP layer with embeddings of its own, which are not supported"
    if reason:
        return reason
    layer = f"model.layers.{num_layers}."
    names = {
        "mtp.fc.": "eh_proj.",
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "shared_head.norm.",
        "mtp.layers.0.": "",
    }
    return MTPSpec(renamed=tuple((old, layer + new) for old, new in names.items()))


def mtp_behind(
    config: ConfigReader, num_layers: int, *, norm: str = "shared_head.norm"
) -> MTPSpec | str:
    """The same for the layout of DeepSeek's checkpoints: ``num_nextn_predict_layers`` layers behind
    the last one, perhaps with copies of the embedding and of the output head. ``norm`` is the name
    of the final norm."""
    if reason := _why_not(config, "num_nextn_predict_layers"):
        return reason
    layer = f"model.layers.{num_layers}."
    copies = f"{layer}embed_tokens.", f"{layer}shared_head.head."
    usual = f"{layer}shared_head.norm."
    renamed = () if norm == "shared_head.norm" else ((f"{layer}{norm}.", usual),)
    return MTPSpec(renamed=renamed, left_out=copies)


def left_out_mtp(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """How names of tensors of MTP layers in that layout begin, for ``TensorNames.left_out``."""
    return names_behind(num_layers, config.integer("num_nextn_predict_layers", 1, minimum=0))


def names_behind(num_layers: int, number: int) -> tuple[str, ...]:
    """How names of tensors of this ``number`` of layers behind the last one begin."""
    return tuple(f"model.layers.{num_layers + layer}." for layer in range(number))


def _why_not(config: ConfigReader, key: str) -> str:
    """Why there is not exactly one MTP layer, by the number that ``key`` gives."""
    number = config.integer(key, 1, minimum=0)
    if number == 1:
        return ""
    return f"has {number or 'no'} MTP layers ({key}), and one alone is supported"
