"""Clients that call the models inside the ensembles directly.

That is allowed: input is checked as if it came from a stranger. In this way no client can crash a
model, or touch another's stream, since streams are named by random keys.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from minisgl_backend.runtime_files import heartbeat_files, read_beat
from minisgl_backend.server.process import TritonServer
from tests.server.client import Call, Refused, text_of, wait_for

PROMPT: dict[str, Any] = {"text_input": "The capital of France", "temperature": 0.0}
WHOLE: dict[str, Any] = {**PROMPT, "max_tokens": 150, "ignore_eos": True}


def tensor(name: str, datatype: str, value: Any) -> grpcclient.InferInput:
    kind = {"UINT8": np.uint8, "BYTES": np.object_, "INT32": np.int32}[datatype]
    array = np.array(value, dtype=kind)
    made = grpcclient.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def call(server: TritonServer, model: str, *inputs: grpcclient.InferInput) -> list[dict[str, Any]]:
    """What a model answers; raises ``Refused``."""
    with Call(server, model, inputs=list(inputs)) as one:
        return one.all()


def send_chunk(server: TritonServer, chunk: bytes) -> list[dict[str, Any]]:
    return call(server, "detokenizer", tensor("chunk", "UINT8", list(chunk)))


def own_chunks(server: TritonServer, **values: Any) -> list[dict[str, Any]]:
    """The chunks of a request that this client passes from model to model."""
    with Call(server, "tokenizer", **values) as tokenizer:
        (told,) = tokenizer.all()
    inputs = (
        tensor("input_ids", "INT32", told["input_ids"].tolist()),
        tensor("request", "BYTES", [told["request"].item()]),
    )
    return [json.loads(it["chunk"].tobytes()) for it in call(server, "llm_engine", *inputs)]


@contextmanager
def others(server: TritonServer) -> Iterator[None]:
    """Requests of others that run meanwhile, streamed or not; nothing happens to them."""

    def whole(stream: bool) -> str:
        with Call(server, **WHOLE, stream=stream) as one:
            return text_of(one.all())

    expected = whole(True)
    processes = [(model, read_beat(path)) for model, path in heartbeat_files(server.directory)]
    with ThreadPoolExecutor(8) as pool:
        running: list[Future[str]] = [pool.submit(whole, n % 2 == 0) for n in range(16)]
        yield
        assert [one.result() for one in running] == [expected] * 16
    for (model, path), (known, beat) in zip(
        heartbeat_files(server.directory), processes, strict=True
    ):
        now = read_beat(path)
        assert beat is not None and now is not None
        assert (model, now.pid) == (known, beat.pid)


def test_a_request_can_be_taken_through_the_models_by_hand(server: TritonServer) -> None:
    answers = []
    for chunk in own_chunks(server, **PROMPT, max_tokens=20):
        answers += send_chunk(server, json.dumps(chunk).encode())
    with Call(server, **PROMPT, max_tokens=20) as ensemble:
        assert text_of(answers) == text_of(ensemble.all())


def test_a_stream_of_another_is_out_of_reach(server: TritonServer) -> None:
    """Even with the engine's path and the key of one's own stream, which the engine reveals."""
    own = own_chunks(server, **PROMPT, max_tokens=2)[-1]
    random_keys = random.Random(5)
    endings: list[dict[str, Any]] = [{"f": ["stop"]}, {"e": ["INTERNAL", "x"]}, {"o": [5]}]
    with others(server):
        for number in range(60):
            near = own["s"] + number - 30
            key = random_keys.choice([number, near, random_keys.getrandbits(64)]) % 2**64
            forged = {"r": own["r"], "s": key, "i": 1 + number % 3, **endings[number % 3]}
            with pytest.raises(Refused, match="the detokenizer was restarted and lost"):
                send_chunk(server, json.dumps(forged).encode())
        for index in (-1, 2**32, 2**70):
            forged = {"r": own["r"], "s": 7, "i": index, "d": {"n": 1}}
            with pytest.raises(Refused, match="chunk is not one that llm_engine sends"):
                send_chunk(server, json.dumps(forged).encode())


def test_arbitrary_bytes_are_answered(server: TritonServer) -> None:
    """Random bytes, and real ones with changes; each request ends, and no other is affected."""
    chance = random.Random(3)
    chunk = json.dumps(own_chunks(server, **PROMPT, max_tokens=2)[-1]).encode()
    with Call(server, "tokenizer", **PROMPT) as tokenizer:
        record: bytes = tokenizer.all()[0]["request"].item()

    def changed(data: bytes) -> bytes:
        spoiled = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
        return bytes(spoiled[: chance.choice([len(spoiled), chance.randrange(1, len(spoiled))])])

    num_refused = 0
    with others(server):
        for number in range(60):
            noise = chance.randbytes(chance.randrange(1, 300))
            for name in ("detokenizer", "llm_engine"):
                data = noise if number % 4 == 0 else changed(chunk if name[0] == "d" else record)
                inputs = [tensor("chunk", "UINT8", list(data))]
                if name == "llm_engine":
                    ids = [chance.randrange(-1, 2048) for _ in range(3)]
                    inputs = [tensor("input_ids", "INT32", ids), tensor("request", "BYTES", [data])]
                try:
                    call(server, name, *inputs)
                except Refused as refused:
                    num_refused += 1
                    message = refused.message
                    assert any(c in message for c in ("INVALID_ARG", "UNSUPPORTED", "INTERNAL"))
                    assert not any(word in message for word in ("Traceback", "/", ".py", "shm"))
    assert num_refused > 60
    wait_for(
        lambda: all(read_beat(path) for _, path in heartbeat_files(server.directory)),
        "all processes",
    )
