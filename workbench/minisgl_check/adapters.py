"""LoRA adapters, some of them broken, that come and go while requests name them.

Knows the demo model, for which it writes adapters, and what callers get: each request is answered
as by its adapter alone, or refused because the adapter has left. Must not know how the engine keeps
adapters.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from minisgl_client.client import AsyncClient
from minisgl_client.errors import InvalidArgument
from safetensors.torch import load_file, save_file

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.models.catalog import load_spec
from minisgl_check.asking import NUM_TOKENS, Asker
from minisgl_check.case import Case
from minisgl_kit.adapters import write_adapter

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_RANKS: Final = (2, 4, 8)
_NUM_LOADERS: Final = 2
_NAMES_OF_A_LOADER: Final = 3
_BROKEN_EVERY: Final = 5
_MOST_GROWN_MB: Final = 50.0


class AdapterTraffic(Asker):
    """The load for one server of the demo model that takes orders about adapters."""

    def warm(self) -> None:
        """Load an adapter, use it and unload it: the first one starts threads."""
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(self._use_one(str(_good(Path(folder))[0])))

    async def _use_one(self, path: str) -> None:
        async with AsyncClient(self._target.grpc_address) as client:
            await client.load_adapter("check-warm", path)
            await client.generate(input_ids=self._prompt(), max_tokens=2, lora_name="check-warm")
            await client.unload_adapter("check-warm")

    def come_and_go(self) -> Case:
        """Load and unload all the time, while requests name what is there."""
        case = Case("adapters come and go")
        with tempfile.TemporaryDirectory() as folder:
            good, broken = _good(Path(folder)), _broken(Path(folder))
            grown_mb = asyncio.run(self._come_and_go(case, good, broken))
        case.expect(grown_mb < _MOST_GROWN_MB, f"memory grew by {grown_mb:.0f} MB")
        case.figures["adapters, MB grown"] = round(grown_mb, 1)
        told = ", ".join(f"{count} {how}" for how, count in sorted(case.ended.items()))
        case.what = f"{case.count} loads; {told}"
        return case

    async def _come_and_go(self, case: Case, good: list[Path], broken: list[Path]) -> float:
        """Returns by how many MB the server's memory grew in the last two thirds."""
        names = [f"check-{number}" for number in range(_NUM_LOADERS * _NAMES_OF_A_LOADER)]
        paths = {name: good[number % len(good)] for number, name in enumerate(names)}
        begin_mb = 0.0

        async def load(own: list[str]) -> None:
            nonlocal begin_mb
            while case.count < self._extent.num_loads:
                case.count += 1
                number = case.count
                if number == self._extent.num_loads // 3:  # by now it has what it keeps for good
                    begin_mb = self._target.stats().resident_mb
                name = self._rng.choice(own)
                await served.unload(name)
                if number % _BROKEN_EVERY:
                    await served.load(name, paths[name])
                else:
                    await served.refuse(name, self._rng.choice(broken))
            for name in own:
                await served.unload(name)

        async def ask() -> None:
            while not loading.done():
                await served.ask(self._rng.choice([None, *served.loaded]))

        async with AsyncClient(self._target.grpc_address, retries=0) as client:
            served = _Served(client, case, self._prompt())
            before = await client.adapters()
            await served.learn(paths)
            case.expect(len(set(served.texts.values())) == 1 + len(good), "adapters change nothing")
            loading = asyncio.gather(*(load(names[i::_NUM_LOADERS]) for i in range(_NUM_LOADERS)))
            await asyncio.gather(loading, *(ask() for _ in range(self._num_clients)))
            case.expect(await client.adapters() == before, "an adapter is left")
        return self._target.stats().resident_mb - begin_mb


class _Served:
    """The adapters that a server has at this moment, and what it says with each."""

    def __init__(self, client: AsyncClient, case: Case, prompt: list[int]) -> None:
        self._client = client
        self._case = case
        self._prompt = prompt
        self._num_loads = 0
        self.loaded: dict[str, int] = {}
        """By name: which load it was."""
        self.texts: dict[str | None, str] = {}
        """By name: the adapter's answer when it is alone; for None, the base model's."""

    async def learn(self, paths: Mapping[str, Path]) -> None:
        self.texts[None] = await self._answer(None)
        for name, path in paths.items():
            await self.load(name, path)
            self.texts[name] = await self._answer(name)
            await self.unload(name)

    async def load(self, name: str, path: Path) -> None:
        await self._client.load_adapter(name, str(path))
        self._num_loads += 1
        self.loaded[name] = self._num_loads

    async def unload(self, name: str) -> None:
        if self.loaded.pop(name, None) is not None:
            await self._client.unload_adapter(name)

    async def refuse(self, name: str, broken: Path) -> None:
        try:
            await self._client.load_adapter(name, str(broken))
        except InvalidArgument:
            self._case.ended["refused"] += 1
        else:
            self._case.expect(False, f"{broken.name} was taken")
            await self._client.unload_adapter(name)

    async def ask(self, name: str | None) -> None:
        number = None if name is None else self.loaded[name]
        try:
            text = await self._answer(name)
        except InvalidArgument:
            is_there = name is None or self.loaded.get(name) == number
            self._case.expect(not is_there, f"{name} was refused while it was loaded")
            self._case.ended["refused"] += 1
        else:
            self._case.expect(text == self.texts[name], f"an answer of {name} is another's")
            self._case.ended["answered"] += 1

    async def _answer(self, name: str | None) -> str:
        told = await self._client.generate(
            input_ids=self._prompt,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            lora_name=name,
        )
        self._case.expect(told.num_output_tokens == NUM_TOKENS, "an answer is short")
        return told.text


def _good(folder: Path) -> list[Path]:
    spec = load_spec(Path(DEMO_MODEL))
    return [write_adapter(folder / f"rank-{rank}", spec, rank=rank, seed=rank) for rank in _RANKS]


def _broken(folder: Path) -> list[Path]:
    """Broken adapters, which the reader notices early, late, and in between."""
    whole = write_adapter(folder / "whole", load_spec(Path(DEMO_MODEL)), rank=4)
    names = ("without-a-config", "without-a-tensor", "of-another-rank", "cut", "not-finite", "dora")
    paths = {name: folder / name for name in names}
    for path in paths.values():
        shutil.copytree(whole, path)
    (paths["without-a-config"] / _CONFIG).unlink()
    tensors = load_file(whole / _WEIGHTS)
    *_, last = tensors
    save_file({k: v for k, v in tensors.items() if k != last}, paths["without-a-tensor"] / _WEIGHTS)
    save_file(
        {**tensors, last: torch.full_like(tensors[last], float("nan"))},
        paths["not-finite"] / _WEIGHTS,
    )
    stored = (whole / _WEIGHTS).read_bytes()
    (paths["cut"] / _WEIGHTS).write_bytes(stored[: len(stored) // 2])
    config = json.loads((whole / _CONFIG).read_text())
    for name, changed in (("of-another-rank", {"r": 8}), ("dora", {"use_dora": True})):
        (paths[name] / _CONFIG).write_text(json.dumps({**config, **changed}))
    return list(paths.values())
