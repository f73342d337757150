"""Many requests to the ensemble at the same moment, over gRPC streams, from several processes.

Clients in one interpreter would be the bottleneck. So each process takes a share of the requests,
sends them once all processes are connected, and keeps the responses as bytes, which are parsed
after the run. Must not know what is made of the answers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Final

from minisgl_backend.errors import EngineFailure
from minisgl_backend.loopback import DIRECT, STREAM_INFER
from minisgl_bench.prompts import Prompt

_CONNECT_S: Final = 120.0
"""Timeout for processes to start and connect."""


@dataclass(slots=True)
class Answer:
    """The responses to one request; times are readings of the machine's monotonic clock."""

    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


def requests_of(prompts: Sequence[Prompt], *, model: str, temperature: float) -> list[bytes]:
    """A serialized request for each prompt; only their lengths end the answers."""
    from minisgl_client.request import build

    return [
        build(
            model,
            "",
            {
                "input_ids": prompt.tokens.tolist(),
                "max_tokens": prompt.num_output_tokens,
                "temperature": temperature,
                "seed": index,
                "ignore_eos": True,
                "stream": True,
            },
        ).to_grpc(None)
        for index, prompt in enumerate(prompts)
    ]


def ask_at_once(address: str, requests: Sequence[bytes], *, num_processes: int) -> list[Answer]:
    """The answer to each request, process by process.

    Raises ``EngineFailure`` if an answer is an error, or a process ends without one.
    """
    context = multiprocessing.get_context("spawn")
    shares = [share for n in range(num_processes) if (share := list(requests[n::num_processes]))]
    barrier = context.Barrier(len(shares))
    processes, pipes = [], []
    try:
        for share in shares:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_client, args=(address, share, barrier, sender))
            process.start()
            sender.close()  # this process's copy, so that an end without an answer is noticed
            processes.append(process)
            pipes.append(receiver)
        return [_answer(one) for pipe in pipes for one in _received(pipe)]
    finally:
        for process in processes:
            process.kill()
            process.join()


_Exchange = tuple[float, list[float], list[bytes], str]
"""One request in a client's process: sent, arrivals, responses, and the error that ended it."""


def _received(pipe: Connection) -> list[_Exchange]:
    try:
        exchanges: list[_Exchange] = pipe.recv()
    except EOFError:
        raise EngineFailure("a client ended without an answer") from None
    return exchanges


def _answer(exchange: _Exchange) -> Answer:
    from minisgl_client.errors import MinisglError
    from minisgl_client.response import deltas_of_message
    from tritonclient.grpc import service_pb2

    sent_s, arrived_s, responses, error = exchange
    if error:
        raise EngineFailure(error)
    answer = Answer(sent_s, arrived_s)
    for response in responses:
        try:
            deltas = deltas_of_message(service_pb2.ModelStreamInferResponse.FromString(response))
        except MinisglError as refused:
            raise EngineFailure(str(refused)) from refused
        answer.num_tokens += sum(delta.num_output_tokens or 0 for delta in deltas)
    return answer


def _client(address: str, requests: list[bytes], barrier: Barrier, results: Connection) -> None:
    """One process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter, which ends this
    results.send(asyncio.run(_ask_all(address, requests, barrier)))


async def _ask_all(address: str, requests: list[bytes], barrier: Barrier) -> list[_Exchange]:
    import grpc.aio

    async with grpc.aio.insecure_channel(address, options=DIRECT) as channel:
        method = channel.unary_stream(STREAM_INFER)

        async def ask(request: bytes) -> _Exchange:
            arrived_s: list[float] = []
            responses: list[bytes] = []
            sent_s, error = time.monotonic(), ""
            try:
                async for response in method(request):
                    arrived_s.append(time.monotonic())
                    responses.append(response)
            except grpc.aio.AioRpcError as failure:
                error = f"{failure.code().name}: {failure.details()}"
            return sent_s, arrived_s, responses, error

        await asyncio.wait_for(channel.channel_ready(), _CONNECT_S)
        await asyncio.to_thread(barrier.wait, _CONNECT_S)
        return list(await asyncio.gather(*map(ask, requests)))
