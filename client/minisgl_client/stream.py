"""One answer as it comes: ``Stream`` for threads, ``AsyncStream`` for asyncio.

Both derive from ``_Answer``, which keeps the deltas, the times and whether the answer has ended.
Must not know a protocol: a ``Transport`` sends and receives.

Invariants: the request is sent when the first delta is requested; it is sent again only as long as
no delta has come; ``close`` cancels an unfinished request, in the server too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress

from minisgl_client.answer import Delta, Result, add_up
from minisgl_client.attempts import Attempts
from minisgl_client.errors import Closed, ConnectionLost, MinisglError
from minisgl_client.request import Request
from minisgl_client.transport import AsyncCall, AsyncTransport, Call, Transport, unless_closed


class _Answer:
    """The deltas so far."""

    def __init__(self, request: Request, attempts: Attempts) -> None:
        self._request = request
        self._attempts = attempts
        self._deltas: list[Delta] = []
        self._waiting: deque[Delta] = deque()
        self._samples_ended: list[bool] = []
        self._first_s: float | None = None
        self._ended_s: float | None = None

    @property
    def request_id(self) -> str:
        return self._request.id

    @property
    def result(self) -> Result:
        """All deltas so far, added up; ``finish_reason`` is None if it was closed early."""
        started_s = self._attempts.started_s
        end_s = time.perf_counter() if self._ended_s is None else self._ended_s
        return add_up(
            self._deltas,
            request_id=self._request.id,
            first_delta_s=None if self._first_s is None else self._first_s - started_s,
            total_s=end_s - started_s,
            num_samples=max(1, len(self._samples_ended)),
        )

    def _take(self, deltas: Sequence[Delta]) -> None:
        """Take a response, which has a delta for each sample, even if nothing is new in it."""
        if self._first_s is None:
            self._first_s = time.perf_counter()
        if not self._samples_ended:
            self._samples_ended = [False] * len(deltas)
        for delta in deltas:
            is_over = self._samples_ended[delta.sample]
            is_end = delta.finish_reason is not None
            if len(deltas) == 1 or (not is_over and (is_end or _says_something(delta))):
                self._waiting.append(delta)
            self._samples_ended[delta.sample] |= is_end

    def _next(self) -> Delta:
        delta = self._waiting.popleft()
        self._deltas.append(delta)
        return delta

    def _end(self) -> None:
        if self._ended_s is None:
            self._ended_s = time.perf_counter()

    @property
    def _is_begun(self) -> bool:
        """Whether a response has come."""
        return bool(self._samples_ended)

    @property
    def _is_whole(self) -> bool:
        """Whether the last delta has come, though perhaps not the end of the stream after it."""
        return self._is_begun and all(self._samples_ended)

    def _check_whole(self) -> None:
        """At the end of the stream, raise ``ConnectionLost`` if the answer is incomplete."""
        if "return_finish_reason" in self._request.values and not self._is_whole:
            raise ConnectionLost("the answer ended before it was whole")


def _says_something(delta: Delta) -> bool:
    return bool(delta.text or delta.num_output_tokens or delta.logprobs or delta.prompt_logprobs)


class Stream(_Answer):
    """An iterator of ``Delta``, and a context manager that closes it.

    Belongs to one thread. Another one may close it, which ends the iteration (over HTTP, when the
    next piece comes).
    """

    def __init__(self, transport: Transport, request: Request, attempts: Attempts) -> None:
        super().__init__(request, attempts)
        self._transport = transport
        self._call: Call | None = None

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        """The next delta; raises ``MinisglError``."""
        if self._ended_s is not None:
            raise StopIteration
        try:
            with unless_closed(self._transport):
                while not self._waiting:
                    call = self._call if self._is_begun else None
                    deltas = self._first() if call is None else call.read()
                    if deltas is None:
                        self._check_whole()
                        break
                    self._take(deltas)
        except BaseException as error:
            if isinstance(error, Exception) and self._ended_s is not None:
                raise StopIteration from None  # closed by another thread
            self.close()
            raise
        if not self._waiting:
            self._end()
            raise StopIteration
        return self._next()

    def _first(self) -> Sequence[Delta] | None:
        while True:
            try:
                self._check_open()
                self._call = self._transport.start(self._request, self._attempts.remaining_ms())
                self._check_open()
                return self._call.read()
            except MinisglError as error:
                pause_s = self._attempts.pause_after(error)
            if self._call is not None:
                self._call.cancel()  # releases its connection
            time.sleep(pause_s)

    def _check_open(self) -> None:
        """Raise ``Closed`` if another thread has closed the stream, perhaps before there was a call
        to cancel."""
        if self._ended_s is not None:
            if self._call is not None:
                self._call.cancel()
            raise Closed("the stream was closed")

    def close(self) -> None:
        """Cancel the request, unless it has ended."""
        if self._ended_s is not None:
            return
        self._end()
        if self._call is not None and self._is_whole:
            with suppress(MinisglError):
                self._call.read()  # the end: a cancel at that moment could crash Triton 24.10
        elif self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncStream(_Answer):
    """An asynchronous iterator of ``Delta``, and a context manager that closes it.

    Belongs to one task; cancelling the task cancels the request.
    """

    def __init__(self, transport: AsyncTransport, request: Request, attempts: Attempts) -> None:
        super().__init__(request, attempts)
        self._transport = transport
        self._call: AsyncCall | None = None

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        """The next delta; raises ``MinisglError``."""
        if self._ended_s is not None:
            raise StopAsyncIteration
        try:
            with unless_closed(self._transport):
                while not self._waiting:
                    call = self._call if self._is_begun else None
                    deltas = await (self._first() if call is None else call.read())
                    if deltas is None:
                        self._check_whole()
                        break
                    self._take(deltas)
        except BaseException:
            await self.aclose()
            raise
        if not self._waiting:
            self._end()
            raise StopAsyncIteration
        return self._next()

    async def _first(self) -> Sequence[Delta] | None:
        while True:
            try:
                self._call = await self._transport.start(
                    self._request, self._attempts.remaining_ms()
                )
                return await self._call.read()
            except MinisglError as error:
                pause_s = self._attempts.pause_after(error)
            if self._call is not None:
                await self._call.cancel()  # releases its connection
            await asyncio.sleep(pause_s)

    async def aclose(self) -> None:
        """Cancel the request, unless it has ended."""
        if self._ended_s is not None:
            return
        self._end()
        if self._call is not None and self._is_whole:
            with suppress(MinisglError):
                await self._call.read()  # the end: a cancel at that moment could crash Triton 24.10
        elif self._call is not None:
            await self._call.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
