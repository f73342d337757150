"""Many requests at the same time: lines in, answers out, in the order of the lines.

Knows order, concurrency and bytes; must not know what a line says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

_READ_AHEAD: Final = 64
"""The most lines that may wait for a place."""
_MOST_HELD: Final = 1024
"""The most answers that may wait for the answer to an earlier line."""


async def lines_of(source: Path | int) -> AsyncIterator[bytes]:
    """The lines of a file or descriptor, without their ends; a slow writer holds nothing up.

    A thread reads, because the loop cannot wait for files; it does not outlive the process.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()
    places = threading.Semaphore(_READ_AHEAD)

    def put(item: bytes | OSError | None) -> None:
        places.acquire()
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def read() -> None:
        with suppress(RuntimeError):  # the loop has ended, so no one awaits lines
            try:
                with open(source, "rb", closefd=isinstance(source, Path)) as file:
                    for line in file:
                        put(line.removesuffix(b"\n"))
                put(None)
            except OSError as error:
                put(error)

    threading.Thread(target=read, name="lines", daemon=True).start()
    while (item := await queue.get()) is not None:
        places.release()
        if isinstance(item, OSError):
            raise item
        yield item


async def in_order(
    lines: AsyncIterator[bytes],
    answer: Callable[[bytes], Awaitable[str]],
    write: Callable[[str], None],
    *,
    concurrency: int,
) -> None:
    """Write the answer to each line, in order, with at most ``concurrency`` under way at a time.

    If cancelled, it cancels all answers under way.
    """
    places = asyncio.Semaphore(concurrency)
    held = asyncio.Semaphore(max(_MOST_HELD, concurrency))
    tasks: asyncio.Queue[asyncio.Task[str] | None] = asyncio.Queue()
    begun: set[asyncio.Task[str]] = set()

    async def one(line: bytes) -> str:
        try:
            return await answer(line)
        finally:
            places.release()

    async def begin_all() -> None:
        try:
            async for line in lines:
                await held.acquire()
                await places.acquire()
                task = asyncio.create_task(one(line))
                begun.add(task)
                tasks.put_nowait(task)
        finally:
            tasks.put_nowait(None)

    reading = asyncio.create_task(begin_all())
    try:
        while (task := await tasks.get()) is not None:
            write(await task)
            held.release()
            begun.discard(task)
        await reading
    finally:
        reading.cancel()
        for unfinished in begun:
            unfinished.cancel()
        await asyncio.gather(reading, *begun, return_exceptions=True)
