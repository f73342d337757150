"""`minisgl bench response-path`: the throughput of Triton and our three models, without a model.

A real tritonserver serves the `minisgl` ensemble with an engine that makes a token for each stream
every 3.4 ms; the rest is real: tokenizing, the loop and the planner, acknowledged packets,
incremental detokenizing with one stop string per request. The client is gRPC in this process, which
on a small machine competes with the server for its cores. It keeps responses as bytes and parses
them after the run: every text must be the expected one.

Each stream makes its requests one after another; their lengths differ, and the streams start one
after another, so that requests do not come in lockstep. The rate is taken over the time in which
all streams were busy.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from minisgl_backend.cli.options import tritonserver_option
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import ConfigError, EngineFailure
from minisgl_backend.loopback import DIRECT, STREAM_INFER
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer_files import load_vocabulary
from minisgl_bench.paced import script_of
from minisgl_bench.servers import started_paced
from minisgl_kit.option_types import POSITIVE, POSITIVE_INT, numbers
from minisgl_kit.report import Report, json_option

STOP: Final = "<|never|>"

streams_option = click.option(
    "--streams",
    default="1,16,64",
    show_default=True,
    callback=numbers(int),
    help="concurrent requests",
)
step_option = click.option(
    "--step-ms", type=POSITIVE, default=3.4, show_default=True, help="time of an engine step"
)
tokens_option = click.option(
    "--tokens",
    type=click.IntRange(min=8),  # a request has at least half of these, in two chunks
    default=384,
    show_default=True,
    help="tokens a request, on average",
)


@dataclass(slots=True)
class Exchange:
    """One request and its responses; times are readings of ``perf_counter``."""

    num_tokens: int
    sent_s: float
    arrived_s: list[float] = field(default_factory=list)
    responses: list[bytes] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """The new text of each response; raises ``EngineFailure`` if one is an error."""
        return [_text(response) for response in self.responses]

    def num_tokens_between(self, begin_s: float, end_s: float) -> float:
        """The number of tokens delivered between these times, estimated by the share of text."""
        sizes = np.array([len(text) for text in self.texts], dtype=np.float64)
        arrived_s = np.array(self.arrived_s)
        inside = (arrived_s >= begin_s) & (arrived_s <= end_s)
        return float(self.num_tokens * sizes[inside].sum() / sizes.sum())


@click.command("response-path")
@streams_option
@step_option
@click.option(
    "--requests", type=POSITIVE_INT, default=6, show_default=True, help="requests a stream, in turn"
)
@tokens_option
@tritonserver_option
@json_option
def response_path(
    streams: Sequence[int],
    step_ms: float,
    requests: int,
    tokens: int,
    tritonserver: str | None,
    json_path: Path | None,
) -> None:
    """Rate and latency of responses through the ensemble, with a simulated engine."""
    report = Report(
        "response path",
        info={"step": f"{step_ms:g} ms", "client": "gRPC (asyncio) on the same machine"},
    )
    with started_paced(
        {"overlap": "false"}, step_s=step_ms / 1000, tritonserver=tritonserver
    ) as server:
        address = f"127.0.0.1:{server.grpc_port}"
        asyncio.run(run_grpc(address, num_streams=8, num_requests=1, num_tokens=64))  # warm-up
        for count in streams:
            exchanges = asyncio.run(
                run_grpc(address, num_streams=count, num_requests=requests, num_tokens=tokens)
            )
            report.add(**summary(exchanges))
    report.emit(json_path)


def summary(exchanges: list[list[Exchange]]) -> dict[str, Any]:
    """The figures of a run, by stream and turn.

    Raises ``EngineFailure`` if a text is not the expected one, and ``ConfigError`` if the streams
    were never busy all at once.
    """
    flat = [exchange for stream in exchanges for exchange in stream]
    _check_texts(flat)
    begin_s = max(stream[0].sent_s for stream in exchanges)
    end_s = min(stream[-1].arrived_s[-1] for stream in exchanges)
    if end_s <= begin_s:  # they begin within a second
        raise ConfigError(
            f"one of {len(exchanges)} streams ended before another began: they need more --requests"
            " or --tokens"
        )
    num_tokens = sum(exchange.num_tokens_between(begin_s, end_s) for exchange in flat)
    first_ms = [1e3 * (exchange.arrived_s[0] - exchange.sent_s) for exchange in flat]
    between_ms = np.concatenate([np.diff(exchange.arrived_s) for exchange in flat]) * 1e3
    num_chunks = sum(len(exchange.arrived_s) for exchange in flat)
    return {
        "streams": len(exchanges),
        "tokens_per_s": num_tokens / (end_s - begin_s),
        "ttft_p50_ms": statistics.median(first_ms),
        "ttft_p99_ms": float(np.percentile(first_ms, 99)),
        "between_chunks_p50_ms": float(np.percentile(between_ms, 50)),
        "between_chunks_p99_ms": float(np.percentile(between_ms, 99)),
        "tokens_per_chunk": sum(exchange.num_tokens for exchange in flat) / num_chunks,
    }


async def run_grpc(
    address: str, *, num_streams: int, num_requests: int, num_tokens: int
) -> list[list[Exchange]]:
    """Send the requests to the ensemble over gRPC; see ``run_streams``."""
    import grpc.aio

    async def ask(prompt: str, length: int) -> Exchange:
        call = method(iter([_request(prompt, length)]))
        exchange = Exchange(length, time.perf_counter())
        async for response in call:
            exchange.arrived_s.append(time.perf_counter())
            exchange.responses.append(response)
        return exchange

    async with grpc.aio.insecure_channel(address, options=DIRECT) as channel:
        # bytes in and out: responses are parsed after the measurement
        method = channel.stream_stream(STREAM_INFER)
        return await run_streams(
            ask, num_streams=num_streams, num_requests=num_requests, num_tokens=num_tokens
        )


async def run_streams(
    ask: Callable[[str, int], Awaitable[Exchange]],
    *,
    num_streams: int,
    num_requests: int,
    num_tokens: int,
) -> list[list[Exchange]]:
    """Keep ``num_streams`` requests in flight, each stream making its requests in turn.

    ``ask`` takes a prompt and the number of tokens to ask for, which is ``num_tokens`` on average.
    """
    lengths = random.Random(num_streams)

    async def stream(number: int) -> list[Exchange]:
        await asyncio.sleep(number / num_streams)
        return [
            await ask(
                f"{number}.{turn} asks something",
                lengths.randint(num_tokens // 2, num_tokens * 3 // 2),
            )
            for turn in range(num_requests)
        ]

    return list(await asyncio.gather(*(stream(number) for number in range(num_streams))))


def _request(prompt: str, num_tokens: int) -> bytes:
    from minisgl_client.request import ASKED, build

    values = {"text_input": prompt, "stop": STOP, "stream": True, "max_tokens": num_tokens}
    # text alone is measured, without the counts that clients ask for
    return build("minisgl", "", {**values, **dict.fromkeys(ASKED, False)}).to_grpc(None)


def _check_texts(exchanges: list[Exchange]) -> None:
    script = script_of(DEMO_MODEL)
    vocabulary = load_vocabulary(DEMO_MODEL)
    for exchange in exchanges:
        token_ids = np.resize(script, exchange.num_tokens).tolist()
        expected = TextStream(vocabulary).push(token_ids, final=True).text
        text = "".join(exchange.texts)
        if text != expected:
            raise EngineFailure(f"expected {expected[:60]!r}..., got {text[:60]!r}...")


def _text(data: bytes) -> str:
    from tritonclient.grpc import service_pb2

    response = service_pb2.ModelStreamInferResponse.FromString(data)
    if response.error_message:
        raise EngineFailure(response.error_message)
    # each string follows its length, in 4 bytes
    return "".join(raw[4:].decode() for raw in response.infer_response.raw_output_contents)
