"""Pages go to main memory and come back as they were, in all layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from minisgl_backend.attention.base import AttentionShape, IndexShape, LayerHeads
from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.execution import host_pages
from minisgl_backend.execution.host_pages import HostPages
from minisgl_backend.execution.storage import KVStorage, bytes_per_page
from minisgl_backend.request import IntArray

NUM_PAGES = 9
PLAIN = AttentionShape(
    num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, windows=(None, None, None)
)
LATENT = replace(PLAIN, num_kv_heads=1, head_dim=12, latent_dim=8)
SHAPES = {
    "plain": PLAIN,
    "latents": LATENT,
    "index keys": replace(LATENT, index=IndexShape(top_k=4, key_dim=6, layers=(0, 2))),
    "two kinds of heads": replace(
        PLAIN, by_layer=(LayerHeads(4, 2, 8), LayerHeads(2, 1, 16), LayerHeads(4, 2, 8))
    ),
}


def copies(*pairs: tuple[int, int]) -> tuple[IntArray, IntArray]:
    """Pages and slots, of pairs of a page and a slot."""
    pages, slots = np.array(pairs, np.int32).T
    return pages, slots


def contents(storage: KVStorage) -> list[Tensor]:
    """The bytes of all pages, [num_pages + 1, bytes] for each tensor."""
    tensors = [*storage.pages, *([] if storage.index_keys is None else [storage.index_keys])]
    return [it.movedim(2, 0).flatten(1).clone().view(torch.uint8) for it in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("staged_pages", [1, 2, 100])
def test_pages_return_as_they_were(
    shape: AttentionShape,
    dtype: torch.dtype,
    staged_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = CpuDevice()
    storage = KVStorage(
        shape, num_pages=NUM_PAGES, page_size=4, dtype=dtype, device=device.torch_device
    )
    assert storage.page_bytes() == bytes_per_page(shape, 4, dtype)
    monkeypatch.setattr(host_pages, "_STAGED_BYTES", staged_pages * storage.page_bytes())
    host = HostPages(storage, device, num_slots=5)
    for tensor in contents(storage):
        assert not tensor.any()
    for pages in [*storage.pages, *([] if storage.index_keys is None else [storage.index_keys])]:
        pages.copy_(torch.randn(pages.shape).to(dtype))
    before = contents(storage)

    def steps() -> None:
        host.save(*copies((3, 4), (0, 0), (8, 1), (1, 2)))
        storage.clear(torch.tensor([0, 3, 8]))
        host.save(*copies((2, 4)))
        host.load(*copies((5, 0), (0, 1), (7, 4)))

    device.submit(steps).result()
    device.close()
    came_from = {0: 8, 5: 0, 7: 2}
    for was, found in zip(before, contents(storage), strict=True):
        for page in range(NUM_PAGES + 1):
            if page in (3, 8):
                assert not found[page].any()
            else:
                assert torch.equal(found[page], was[came_from.get(page, page)])


def test_window_pages_return_as_they_were() -> None:
    """Pages of the other layers stay as they are."""
    shape = replace(PLAIN, windows=(None, 5, 5), window_pages=True)
    device = CpuDevice()
    storage = KVStorage(
        shape,
        num_pages=NUM_PAGES,
        page_size=4,
        dtype=torch.float32,
        device=device.torch_device,
        num_window_pages=6,
    )
    page_bytes = bytes_per_page(shape, 4, torch.float32, window_pages=True)
    assert storage.page_bytes(window_pages=True) == page_bytes == 2 * storage.page_bytes()
    host = HostPages(storage, device, num_slots=3, window_pages=True)
    for pages in storage.pages:
        pages.copy_(torch.randn(pages.shape))
    before = contents(storage)

    def steps() -> None:
        host.save(*copies((3, 2), (0, 1)))
        storage.clear(torch.tensor([0, 3]), window_pages=True)
        host.load(*copies((5, 2), (0, 1)))

    device.submit(steps).result()
    device.close()
    (of_all, of_windows), found = before, contents(storage)
    assert torch.equal(found[0], of_all)
    for page, expected in enumerate((0, 1, 2, None, 4, 3, 6)):
        if expected is None:
            assert not found[1][page].any()
        else:
            assert torch.equal(found[1][page], of_windows[expected])


def test_consecutive_slots_are_one_copy() -> None:
    found = list(host_pages._runs(np.array([4, 5, 6, 2, 3, 3, 1], np.int32)))
    assert found == [(0, 3, 4), (3, 5, 2), (5, 6, 3), (6, 7, 1)]
    assert list(host_pages._runs(np.array([7], np.int32))) == [(0, 1, 7)]
