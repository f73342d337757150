"""Many requests at a time: their order, concurrency, and how much is held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from minisgl_client.cli import lines


async def numbers(count: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield b"%d" % number


async def test_answers_that_wait_for_a_slow_one_are_bounded_in_number() -> None:
    most = lines._MOST_HELD
    begun = 0
    written: list[str] = []
    slow = asyncio.Event()

    async def answer(line: bytes) -> str:
        nonlocal begun
        begun += 1
        if line == b"0":
            await slow.wait()
        return line.decode()

    task = asyncio.create_task(
        lines.in_order(numbers(3 * most), answer, written.append, concurrency=2)
    )
    while begun < most:
        await asyncio.sleep(0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert begun == most and not written
    slow.set()
    await task
    assert written == [str(number) for number in range(3 * most)]


async def test_no_more_at_a_time_than_asked_for() -> None:
    running, most = 0, 0

    async def answer(line: bytes) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return line.decode()

    await lines.in_order(numbers(50), answer, lambda _: None, concurrency=3)
    assert most == 3
