"""How a checkpoint stores the weights of its projections: plain facts, without tensors.

A ``WeightFormat`` says which tensors hold a weight and how its numbers are scaled; a
``WeightFormats`` says which projection has which. ``models.quantization`` reads both from the files
of a checkpoint, ``layers.weight_layouts`` reads the tensors. Must not know either, nor devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import Final


class Encoding(Enum):
    """The numbers that a quantized weight consists of, before scaling."""

    E4M3 = "fp8"
    """8-bit floats: a sign, 4 bits of exponent and 3 of mantissa, up to 448, no infinities."""
    INT8 = "int8"
    INT4 = "int4"
    E2M1 = "fp4"
    """4-bit floats: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign (OCP MX)."""

    @property
    def bits(self) -> int:
        return 8 if self in (Encoding.E4M3, Encoding.INT8) else 4


class Layout(Enum):
    """Which tensors hold one weight, and how they are packed (``layers.weight_layouts``)."""

    FP8 = "weight and weight_scale or weight_scale_inv"
    MXFP8 = "weight and weight_scale or weight_scale_inv, exponents"
    INT8 = "weight, signed, and weight_scale"
    CONVERTED = "weight, in 16 or 32 bits, quantized while it is loaded"
    GPTQ = "qweight, qzeros less 1, scales and g_idx"
    GPTQ_V2 = "qweight, qzeros, scales and g_idx"
    AWQ = "qweight, qzeros and scales"
    PACKED = "weight_packed, weight_scale, weight_zero_point and weight_g_idx"
    MX_PACKED = "weight_packed and weight_scale, exponents"
    NV_PACKED = "weight_packed, weight_scale and weight_global_scale, by which is divided"
    NV_MODELOPT = "weight, weight_scale and weight_scale_2"
    MX_STACKED = "blocks and scales of all experts"


GROUP_OF_NVFP4: Final = 16
"""Inputs that share a scale in NVFP4."""
GROUP_OF_MX: Final = 32
"""Inputs that share one in MXFP4 and MXFP8, where scales are exponents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the numbers of a weight [outputs, inputs] are stored.

    ``block`` (outputs, inputs): how many neighbours share a scale; None stands for all.
    ``symmetric``: there are no zero points. ``reorders``: the inputs of a group need not be
    neighbours; a tensor says which group each one belongs to. ``static_inputs``: the checkpoint
    also has scales of activations; they are checked, and no kernel uses them.
    """

    layout: Layout
    encoding: Encoding
    block: tuple[int | None, int | None]
    symmetric: bool = True
    reorders: bool = False
    static_inputs: bool = False

    @property
    def has_row_scales(self) -> bool:
        """Whether a float32 scale of the whole weight multiplies those of groups, which are 8-bit
        floats (NVFP4)."""
        return self.encoding is Encoding.E2M1 and self.block[1] == GROUP_OF_NVFP4

    @property
    def stored_as(self) -> tuple[object, ...]:
        """What formats must have in common to share a matrix in memory."""
        return self.encoding, self.block, self.symmetric, self.reorders

    def __str__(self) -> str:
        """As the log shows it: ``fp8 in blocks of 128 x 128``."""
        outputs, inputs = self.block
        if outputs is None:
            scaling = "per tensor"
        elif inputs is None:
            scaling = "per channel"
        elif outputs == 1:
            scaling = f"in groups of {inputs}"
        else:
            scaling = f"in blocks of {outputs} x {inputs}"
        notes = [] if self.symmetric else ["zero points"]
        notes += ["reordered"] if self.reorders else []
        return f"{self.encoding.value} {scaling}" + (f" ({', '.join(notes)})" if notes else "")


CONVERTED_FP8: Final = WeightFormat(
    layout=Layout.CONVERTED, encoding=Encoding.E4M3, block=(128, 128)
)
"""The format into which ``quantization=fp8`` converts weights of 16 or 32 bits."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of some projections; None for plain.

    They are those whose names ``pattern`` matches in full. In place of one it may be a set of
    modules: they and all below them, wherever else their names begin. Checkpoints list tens of
    thousands.
    """

    pattern: re.Pattern[str] | frozenset[str]
    format: WeightFormat | None

    def is_for(self, name: str) -> bool:
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.fullmatch(name) is not None
        parts = name.split(".")
        spans = combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[begin:end]) in self.pattern for begin, end in spans)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a checkpoint's projections, by their names.

    The first of the ``rules`` that matches counts, and a projection without a rule is plain.
    Embeddings always are, and so are the weights of index queries, which publishers list by another
    name (GLM-5's is ``indexers_proj``) or not at all. ``method`` is the name of the tool, for
    messages.
    """

    method: str
    rules: tuple[Rule, ...]

    def of(self, name: str, *others: str) -> WeightFormat | None:
        """The format of the projection ``name``, such as ``model.layers.0.mlp.down_proj``, which
        rules may call by one of the ``others``, too."""
        if name.endswith(("embed_tokens", ".indexer.weights_proj")):
            return None
        for rule in self.rules:
            if any(map(rule.is_for, (name, *others))):
                return rule.format
        return None

    def __str__(self) -> str:
        """As the log shows them, without the plain ones."""
        formats = dict.fromkeys(rule.format for rule in self.rules if rule.format is not None)
        return f"{', '.join(map(str, formats))} ({self.method})"


_STAY_PLAIN: Final = (
    r"gate|router|router\.proj|shared_expert_gate|linear_attn\.in_proj_(?:ba|[ab])"
    r"|self_attn\.(?:b|[fg]_[ab])_proj"
)
CONVERT_TO_FP8: Final = WeightFormats(
    "converted while loading",
    (Rule(re.compile(rf"model\.layers\.(?!.*\.(?:{_STAY_PLAIN})$).*"), CONVERTED_FP8),),
)
"""All projections of the layers except routers, gates of shared experts, rates of Gated DeltaNet,
and rates of Kimi Delta Attention and its decays and gates unless they are direct projections.
Weights of index queries stay plain in every format (``of``); ``LatentAttention`` keeps its gates
and ``kv_b_proj`` plain itself. The output head stays as it is."""
