"""Cut the device code of FlashAttention-3 in sgl_kernel down to what one test machine runs.

Kept: the forward kernels of one architecture, without softcap, for the dtypes and head dimensions
asked for, and the helpers (combine, scheduling).

The library embeds one fat binary per CUDA source file: every architecture, head dimension and
dtype, 1.6 GB in total. An image that is not needed is overwritten with zeros in place. Offsets
stay, so the library loads as before; CUDA reads an image when one of its kernels is first launched.
A kernel whose image is gone fails at its launch: the result is for tests, never for a release.

The containers' layout was read from the published library: a fat binary is a 16-byte header (magic,
version, header size, body size) and entries, each with its own header size, payload size and, at
byte 28, the architecture; a payload is an ELF file, as it is or compressed with zstd.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FATBIN = struct.pack("<I", 0xBA55ED50)
_ZSTD = b"\x28\xb5\x2f\xfd"
_FORWARD = re.compile(rb"MainloopFwdSm(\d+)\w*?(bfloat16_t|half_t|float_e4m3_t)")


@dataclass(frozen=True, slots=True)
class Image:
    """Device code for one architecture: where its payload is in the file."""

    offset: int
    size: int
    arch: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which forward kernels to keep."""

    arch: int
    head_dims: frozenset[int]
    dtypes: frozenset[str]


def trim(library: Path, wanted: Wanted) -> tuple[int, int]:
    """Zero the images in ``library`` that are not wanted; returns the bytes of device code kept and
    found."""
    kept = found = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        for image in _images(content):
            found += image.size
            end = image.offset + image.size
            if image.arch == wanted.arch and _is_wanted(content[image.offset : end], wanted):
                kept += image.size
            else:
                content[image.offset : end] = bytes(image.size)
    return kept, found


def _images(content: mmap.mmap) -> Iterator[Image]:
    start = content.find(_FATBIN)
    while start >= 0:
        header, body = struct.unpack_from("<6xHQ", content, start)
        entry, end = start + header, start + header + body
        while entry < end:
            entry_header, size = struct.unpack_from("<4xIQ", content, entry)
            (arch,) = struct.unpack_from("<I", content, entry + 28)
            yield Image(entry + entry_header, size, arch)
            entry += entry_header + size
        start = content.find(_FATBIN, end)


def _is_wanted(payload: bytes, wanted: Wanted) -> bool:
    """Whether an image holds a kernel that tests launch; helpers without a main loop all stay."""
    import zstandard

    if payload.startswith(_ZSTD):
        payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
    loops = list(_FORWARD.finditer(payload))
    if not loops:
        return True
    match = min(loops, key=lambda loop: len(loop.group()))
    name = match.group()
    if int(match.group(1)) != wanted.arch:
        return False
    # The mangled template arguments before the dtype: stages, cluster, tile (M, N, head dim) as
    # integers, where a repeated one is a back reference, then the head dimension of V. After it, as
    # flags: causal, local, softcap and so on.
    numbers = [int(n) for n in re.findall(rb"Li(\d+)E", name)]
    value_dim, tile = numbers[-1], numbers[2:-1]
    other_head_dim = len(tile) > 2 and tile[-1] not in wanted.head_dims
    flags = re.findall(rb"Lb([01])E", payload[match.end() : match.end() + 80])
    softcap = flags[2] == b"1"
    return (
        match.group(2).decode() in wanted.dtypes
        and value_dim in wanted.head_dims
        and not other_head_dim
        and not softcap
    )
