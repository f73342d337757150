"""A replica of the engine: a process that its parent started as one of several (``replicas``).

The program is ``python -m minisgl_backend.replica``. It gets three numbers: its own, the descriptor
of its socket to the parent, and the parent's process id. It reads options, loads the engine, and
then takes requests and reports their events, in the messages of ``replicas.messages``.

The path of a token: the engine's thread puts it into a queue; a sender thread takes everything that
is there, and makes one message of it when the ``Gatherer`` says so. So the engine never waits for
the parent. The process ends when the parent closes its end of the socket, or when the engine
breaks; in the second case another process follows it. Must not know Triton, the other replicas, or
why a request comes to this one.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from minisgl_backend.build import build_engine_alone
from minisgl_backend.config import EngineOptions
from minisgl_backend.death_signal import end_with
from minisgl_backend.errors import (
    EngineFailure,
    EngineLost,
    InvalidRequest,
    MiniSGLError,
    Overloaded,
)
from minisgl_backend.parts import STANDARD, Parts
from minisgl_backend.replicas.gatherer import Gatherer, Happened
from minisgl_backend.replicas.messages import (
    Incoming,
    Message,
    decode_event,
    decode_request,
    encode_info,
    encode_observations,
    encode_stats,
    send,
)
from minisgl_backend.request import (
    Event,
    Failed,
    Finished,
    FinishReason,
    IntArray,
    RequestId,
    TerminalEvent,
    samples_of,
)
from minisgl_backend.routing.cache_index import TreeReports
from minisgl_backend.routing.keys import Keys
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime_files import State

logger = logging.getLogger(__name__)

_PULSE_EVERY_S: Final = 0.25
_MOST_AT_ONCE: Final = 4096
"""The most events and other updates that are gathered before some are sent."""


def serve(connection: socket.socket, parts: Parts = STANDARD) -> int:
    """Be a replica until the parent closes its end; the exit code."""
    incoming = Incoming(connection)
    first = incoming.receive()
    if first is None:
        return 1
    happened: queue.SimpleQueue[Happened] = queue.SimpleQueue()
    try:
        options = EngineOptions.from_mapping(first["options"])
        watch, host_watch = (
            TreeReports(
                options.page_size,
                publish=partial(_put_published, happened, plus),
                evict=partial(_put_left, happened, minus),
                forget=lambda: happened.put(["0"]),
            )
            for plus, minus in (("+", "-"), ("h+", "h-"))
        )
        engine = build_engine_alone(options, parts, watch=watch, host_watch=host_watch)
    except Exception as error:
        if not isinstance(error, MiniSGLError):
            logger.exception("this replica cannot start")
        send(connection, {"error": str(error)})
        return 1
    # what is loaded stays: searching it for garbage again would delay steps by up to 0.1 s
    gc.collect()
    gc.freeze()
    stats = encode_stats(engine.stats())
    send(connection, {"info": encode_info(engine.info), "stats": stats})
    sender = threading.Thread(
        target=_send_updates, args=(connection, engine, happened), name="updates", daemon=True
    )
    sender.start()
    with ThreadPoolExecutor(1, thread_name_prefix="adapter orders") as orders:
        while (message := incoming.receive()) is not None:
            _take(message, engine, happened.put, orders)
        orders.shutdown(cancel_futures=True)
    engine.close(drain_s=0)
    return 0


def _put_published(
    happened: queue.SimpleQueue[Happened], word: str, keys: Keys, pages: IntArray
) -> None:
    happened.put([word, keys.tolist(), pages.tolist()])


def _put_left(happened: queue.SimpleQueue[Happened], word: str, pages: IntArray) -> None:
    happened.put([word, pages.tolist()])


def _take(
    message: Message, engine: Engine, put: Callable[[Happened], None], orders: ThreadPoolExecutor
) -> None:
    """Submit or abort a request; load or unload an adapter, in order, on the thread of
    ``orders``."""

    def sink(request_id: RequestId, event: Event) -> None:
        put((request_id, event))

    if "load" in message:
        orders.submit(_load, message["load"], engine, put)
        return
    if "unload" in message:
        orders.submit(_unload, message["unload"], engine)
        return
    if "abort" in message:
        end = decode_event(message["abort"])
        assert isinstance(end, TerminalEvent)
        why = end.reason if isinstance(end, Finished) else end.error
        assert isinstance(why, FinishReason | EngineFailure)
        engine.abort(RequestId(message["abort"][1]), why)
        return
    request, ids = decode_request(message)
    try:
        engine.submit_samples(samples_of(request, ids), [partial(sink, each) for each in ids])
    except MiniSGLError as error:
        # the parent keeps the limits of the queue, so only an engine that breaks is overloaded
        is_lost = isinstance(error, Overloaded)
        end = Failed(EngineLost(str(error)) if is_lost else error)
        for each in ids:
            sink(each, end)


def _load(order: tuple[int, str, str], engine: Engine, put: Callable[[Happened], None]) -> None:
    adapter_id, name, path = order
    assert engine.pool is not None
    try:
        adapter = engine.pool.load(name, path, adapter_id=adapter_id)
    except InvalidRequest as error:
        put(["l", adapter_id, str(error)])
    except Exception as error:
        logger.exception("adapter %r cannot be loaded", name)
        put(["l", adapter_id, f"adapter {name!r} cannot be loaded: {error}"])
    else:
        put(["l", adapter_id, adapter.facts])


def _unload(name: str, engine: Engine) -> None:
    assert engine.pool is not None
    with suppress(InvalidRequest):  # it could not be loaded here
        engine.pool.unload(name)


def _send_updates(
    connection: socket.socket, engine: Engine, happened: queue.SimpleQueue[Happened]
) -> None:
    """Send updates as they come, and signs of life; end the process when the engine has broken."""
    gatherer = Gatherer()
    sent_s = observations_due_s = 0.0
    with suppress(OSError):  # the parent is gone, and this process will be
        while True:
            is_broken = engine.health().state is State.BROKEN
            _gather(happened, gatherer)
            now_s = time.monotonic()
            updates = gatherer.take(now_s, everything=is_broken)
            if is_broken and not updates:
                logger.error("the engine has broken: this process ends")
                logging.shutdown()
                os._exit(1)
            message: dict[str, Any] = {"stats": encode_stats(engine.stats())}
            if updates:
                message["updates"] = updates
            elif now_s - sent_s >= _PULSE_EVERY_S:
                message["pulse"] = engine.health().tick_age_s
            else:
                continue
            if now_s >= observations_due_s:
                message["observations"] = encode_observations(engine.take_observations())
                observations_due_s = now_s + _PULSE_EVERY_S
            send(connection, message)
            sent_s = now_s


def _gather(happened: queue.SimpleQueue[Happened], gatherer: Gatherer) -> None:
    """Gather everything that has happened, after waiting until something is due, or a while."""
    due_s = gatherer.due_s()
    left_s = _PULSE_EVERY_S if due_s is None else due_s - time.monotonic()
    with suppress(queue.Empty):
        gatherer.add(happened.get(timeout=max(0.0, left_s)))
        for _ in range(_MOST_AT_ONCE):
            gatherer.add(happened.get_nowait())


def main(parts: Parts = STANDARD) -> NoReturn:
    """Be the replica that the process's arguments name, then end the process."""
    number, descriptor, parent = map(int, sys.argv[1:])
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    logging.basicConfig(level=logging.WARNING, format=f"replica {number}: %(name)s: %(message)s")
    logging.getLogger("minisgl_backend").setLevel(logging.INFO)
    code = serve(socket.socket(fileno=descriptor), parts)
    logging.shutdown()
    os._exit(code)  # threads of a library must not hold the process up


if __name__ == "__main__":
    main()
