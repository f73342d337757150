"""The layouts of quantized weights in checkpoints, read into the only layout that kernels know.

Each ``Layout`` has a reader. It lists the tensors that hold one projection's weight, and the
regions in which a rank's share lies, and makes a ``QuantizedWeight`` of what was read. Must not
know models, files, or what is computed with a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final, Protocol

import torch
from torch import Tensor

from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.quantized import QuantizedWeight, joined
from minisgl_backend.layers.weight_place import FLOATS, ReadTensor, Share, StoredTensor
from minisgl_backend.layers.weight_share import WeightShare, cells, held
from minisgl_backend.weight_format import Layout

_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the codes of eight neighbouring outputs are, in units of 4 bits."""


class Reader(Protocol):
    """Reads one layout."""

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        """What to read, by the role that it plays."""

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        """The share of the weight, made of the regions that were read, on their device. Raises a
        ``ConfigError`` that names a tensor with invalid values."""


class _Fp8:
    """``weight`` in 8-bit floats, and its scales: a single one, one per row, or one per block. In
    MXFP8 these are exponents, uint8 or of the type for them; in memory they are numbers, too.

    In spite of its name, ``weight_scale_inv`` is what the weight is multiplied by.
    """

    def __init__(self, scale_types: tuple[str, ...]):
        self._scale_types = scale_types

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        return {
            "codes": _whole_bytes("F8_E4M3", share),
            "scales": _block_scales(
                share, ("weight_scale_inv", "weight_scale"), self._scale_types, signed=False
            ),
            "input_scale": replace(
                _scale_of_all("input_scale", "activation_scale"),
                optional=not share.form.static_inputs,
            ),
        }

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        scales = found["scales"].values
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)
        scales = scales.float().reshape(share.lines.size, share.width.size)
        return share.of(found["codes"].values, scales)


class _Int8:
    """compressed-tensors: ``weight`` int8, ``weight_scale`` a single one or one per row. There may
    be a scale and a zero point of activations."""

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        return {
            "codes": _whole_bytes("I8", share),
            "scales": _block_scales(share, ("weight_scale",), FLOATS),
            "input_scale": replace(
                _scale_of_all("input_scale"), optional=not share.form.static_inputs
            ),
            "input_zero": StoredTensor(
                names=("input_zero_point",), shapes=((), (1,)), dtypes=("I8", "I32"), optional=True
            ),
        }

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        scales = found["scales"].values.reshape(share.lines.size, share.width.size)
        return share.of(found["codes"].values.view(torch.uint8) ^ 128, scales)  # 128 more


class _Converted:
    """A plain ``weight`` that is quantized here."""

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        shape = share.outs.total, share.ins.total
        return {"weight": StoredTensor(names=("weight",), shapes=(shape,), region=share.enclosing)}

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        return share.quantized(found["weight"].values)


class _Gptq:
    """32-bit words with codes of neighbouring inputs, the first in the lowest bits.

        qweight [in / codes per word, out]   qzeros [groups, out / codes per word]
        scales  [groups, out]                g_idx  [in], the group of each input

    The first version stores each zero point minus 1, subtracted from whole words, so adding it back
    must carry in the same way.
    """

    def __init__(self, zero_offset: int):
        self._zero_offset = zero_offset

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        words = cells(share.ins, 32 // share.form.encoding.bits)
        return {
            "codes": StoredTensor(
                names=("qweight",),
                shapes=((words.total, share.outs.total),),
                dtypes=("I32",),
                region=(held(words), held(share.outs)),
            ),
            **_group_scales(share),
            "groups": _group_indices("g_idx", share),
        }

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        bits = share.form.encoding.bits
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = found["zeros"].values + self._zero_offset * ones  # wraps around
        zeros = _within(_unpacked(words, bits), share.outs, bits).t()  # [outs.size, groups]
        if share.form.symmetric and zeros.ne(1 << (bits - 1)).any():
            raise ConfigError(
                f"{found['zeros'].name} has zero points other than {1 << (bits - 1)}, though the "
                "checkpoint says that it is symmetric"
            )
        return share.of(
            _bytes_within(found["codes"].values.t(), share.ins, bits),
            found["scales"].values.t(),
            None if share.form.symmetric else zeros,
            _groups(share, found),
        )


class _Awq:
    """32-bit words with codes of eight neighbouring outputs, in the order ``_AWQ_ORDER``.

    qweight [in, out / 8]   qzeros [groups, out / 8]   scales [groups, out]
    """

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        words = cells(share.outs, 8)
        return {
            "codes": StoredTensor(
                names=("qweight",),
                shapes=((share.ins.total, words.total),),
                dtypes=("I32",),
                region=(held(share.ins), held(words)),
            ),
            **_group_scales(share),
        }

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        def unpacked(words: Tensor) -> Tensor:
            halves = _unpacked(words, 4)
            halves = halves.view(len(halves), -1, 8)[..., list(_AWQ_ORDER)]
            return _within(halves.flatten(-2), share.outs, 4).t()

        return share.of(
            joined(unpacked(found["codes"].values).contiguous()),
            found["scales"].values.t(),
            unpacked(found["zeros"].values),
        )


class _Packed:
    """compressed-tensors: 32-bit words with codes of neighbouring inputs, the first in the lowest
    bits; zero points are packed along neighbouring outputs.

    weight_packed [out, in / codes per word]   weight_zero_point [out / codes per word, groups]
    weight_scale  [out, groups]                weight_g_idx [in]   weight_shape [2]
    """

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        per_word = 32 // share.form.encoding.bits
        words, width = cells(share.ins, per_word), share.width
        tensors = {
            "codes": StoredTensor(
                names=("weight_packed",),
                shapes=((share.outs.total, words.total),),
                dtypes=("I32",),
                region=(held(share.outs), held(words)),
            ),
            "scales": _block_scales(share, ("weight_scale",), FLOATS),
            "groups": _group_indices("weight_g_idx", share),
            "shape": StoredTensor(
                names=("weight_shape",), shapes=((2,),), dtypes=("I64", "I32"), optional=True
            ),
        }
        if not share.form.symmetric:
            words = cells(share.outs, per_word)
            tensors["zeros"] = StoredTensor(
                names=("weight_zero_point",),
                shapes=((words.total, width.total),),
                dtypes=("I32",),
                region=(held(words), held(width)),
            )
        return tensors

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        bits, shape = share.form.encoding.bits, [share.outs.total, share.ins.total]
        if "shape" in found and (said := found["shape"].values.tolist()) != shape:
            raise ConfigError(f"{found['shape'].name} is {said}, the model needs {shape}")
        zeros = None
        if "zeros" in found:
            columns = _unpacked(found["zeros"].values.t(), bits)  # [groups, outputs]
            zeros = _within(columns, share.outs, bits).t()
        return share.of(
            _bytes_within(found["codes"].values, share.ins, bits),
            found["scales"].values.reshape(share.lines.size, share.width.size),
            zeros,
            _groups(share, found),
        )


class _MxPacked:
    """compressed-tensors: weight_packed uint8 [out, in / 2], the even input in the low half, and
    weight_scale uint8 [out, in / 32], exponents."""

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        return {
            "codes": _packed_halves("weight_packed", share),
            "scales": _block_scales(share, ("weight_scale",), ("U8", "F8_E8M0")),
        }

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        return share.of(found["codes"].values, found["scales"].values.view(torch.uint8))


class _Nvfp4:
    """NVFP4: codes uint8 [out, in / 2], the even input in the low half, weight_scale float8_e4m3fn
    [out, in / 16], and a float32 scale of the whole weight.

        compressed-tensors   weight_packed, weight_global_scale, by which is divided
        ModelOpt             weight, weight_scale_2

    Scales of groups may be 0: so are groups of zeros. There may be a scale of activations. No
    kernel uses it, and in published checkpoints those of some experts are not finite.
    """

    def __init__(self, codes: str, whole: str, inputs: str, *, divides: bool):
        self._codes, self._whole, self._inputs, self._divides = codes, whole, inputs, divides

    def tensors(self, share: WeightShare) -> Mapping[str, StoredTensor]:
        scales = _block_scales(share, ("weight_scale",), ("F8_E4M3",), signed=False)
        return {
            "codes": _packed_halves(self._codes, share),
            "scales": replace(scales, may_be_zero=True),
            "whole": _scale_of_all(self._whole),
            "input_scale": StoredTensor(names=(self._inputs,), shapes=((), (1,)), optional=True),
        }

    def read(self, share: WeightShare, found: Mapping[str, ReadTensor]) -> QuantizedWeight:
        scale = found["whole"].values.float().reshape(())
        if self._divides:
            scale = scale.reciprocal()
            if not scale.isfinite():
                raise ConfigError(f"{found['whole'].name} is too small to divide by")
        row_scales = scale.repeat(share.outs.size)
        return share.of(found["codes"].values, found["scales"].values, row_scales=row_scales)


READERS: Final[Mapping[Layout, Reader]] = MappingProxyType(
    {
        Layout.FP8: _Fp8((*FLOATS, "F8_E8M0")),
        Layout.MXFP8: _Fp8(("U8", "F8_E8M0")),
        Layout.INT8: _Int8(),
        Layout.CONVERTED: _Converted(),
        Layout.GPTQ: _Gptq(zero_offset=1),
        Layout.GPTQ_V2: _Gptq(zero_offset=0),
        Layout.AWQ: _Awq(),
        Layout.PACKED: _Packed(),
        Layout.MX_PACKED: _MxPacked(),
        Layout.NV_PACKED: _Nvfp4(
            "weight_packed", "weight_global_scale", "input_global_scale", divides=True
        ),
        Layout.NV_MODELOPT: _Nvfp4("weight", "weight_scale_2", "input_scale", divides=False),
    }
)


def _whole_bytes(dtype: str, share: WeightShare) -> StoredTensor:
    """Codes of 8 bits [out, in]."""
    return StoredTensor(
        names=("weight",),
        shapes=((share.outs.total, share.ins.total),),
        dtypes=(dtype,),
        region=(held(share.outs), held(share.ins)),
    )


def _packed_halves(name: str, share: WeightShare) -> StoredTensor:
    """Codes of 4 bits [out, in / 2], the even input in the low half of a byte."""
    octets = cells(share.ins, 2)
    return StoredTensor(
        names=(name,),
        shapes=((share.outs.total, octets.total),),
        dtypes=("U8",),
        region=(held(share.outs), held(octets)),
    )


def _scale_of_all(*names: str) -> StoredTensor:
    """One scale, of a whole weight or of activations."""
    return StoredTensor(names=names, shapes=((), (1,)), is_scale=True, signed=False)


def _block_scales(
    share: WeightShare, names: tuple[str, ...], dtypes: tuple[str, ...], *, signed: bool = True
) -> StoredTensor:
    """Scales [lines, width]; scales of whole tensors and of rows may have fewer dimensions, those
    of blocks may be [lines, 1, width, 1], as ModelOpt writes them. If ``signed``, they may be
    negative, as some tools write them for integers."""
    lines, width = share.lines, share.width
    shapes: tuple[tuple[int, ...], ...] = ((lines.total, width.total),)
    rows, columns = share.form.block
    if rows is None:
        shapes += ((), (1,))
    elif columns is None:
        shapes += ((lines.total,),)
    elif rows > 1:
        shapes += ((lines.total, 1, width.total, 1),)
    region = (held(lines), held(width))
    return StoredTensor(
        names=names, shapes=shapes, dtypes=dtypes, region=region, is_scale=True, signed=signed
    )


def _group_scales(share: WeightShare) -> dict[str, StoredTensor]:
    """Scales [groups, out] and zero points, packed along the outputs."""
    width, words = share.width, cells(share.outs, 32 // share.form.encoding.bits)
    return {
        "scales": StoredTensor(
            names=("scales",),
            shapes=((width.total, share.outs.total),),
            region=(held(width), held(share.outs)),
            is_scale=True,
        ),
        "zeros": StoredTensor(
            names=("qzeros",),
            shapes=((width.total, words.total),),
            dtypes=("I32",),
            region=(held(width), held(words)),
        ),
    }


def _group_indices(name: str, share: WeightShare) -> StoredTensor:
    return StoredTensor(
        names=(name,),
        shapes=((share.ins.total,),),
        dtypes=("I32", "I64"),
        region=(held(share.ins),),
        optional=not share.form.reorders,
    )


def _groups(share: WeightShare, found: Mapping[str, ReadTensor]) -> Tensor | None:
    """The groups of the inputs. Raises ``ConfigError`` if they are impossible."""
    if "groups" not in found:
        return None
    name, groups, ins = found["groups"].name, found["groups"].values.int(), share.ins
    size = share.form.block[1] or ins.total
    num_groups = -(-ins.total // size)
    if share.form.reorders:
        if ((groups < 0) | (groups >= num_groups)).any():
            raise ConfigError(f"{name} has groups that are not among the {num_groups} there are")
        return groups
    if groups.ne(torch.arange(ins.start, ins.end, device=groups.device) // size).any():
        raise ConfigError(
            f"{name} reorders the inputs, though the checkpoint says that it does not"
        )
    return None


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes in 32-bit words along the last dimension, lowest bits first, as uint8."""
    octets = _octets(words)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)


def _octets(words: Tensor) -> Tensor:
    """The bytes of words along the last dimension, lowest first. (A view of bytes needs a stride of
    1 there, which ``contiguous`` does not give a tensor of one column.)"""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _within(codes: Tensor, share: Share, bits: int) -> Tensor:
    """The codes that a share holds, out of those of whole words."""
    begin = share.start % (32 // bits)
    return codes[..., begin : begin + share.size]


def _bytes_within(words: Tensor, share: Share, bits: int) -> Tensor:
    """The same for codes that stay packed: uint8, two 4-bit codes per byte, the even one low."""
    per_byte = 8 // bits
    begin = share.start % (32 // bits) // per_byte
    return _octets(words)[:, begin : begin + share.size // per_byte]
