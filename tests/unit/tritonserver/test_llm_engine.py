"""The model ``llm_engine`` with the real loop and planner, a fake executor and a fake Triton."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.limits import Limits
from minisgl_backend.request import AdapterFacts, Finished, FinishReason, Request, Sink
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime_files import (
    ADAPTERS,
    DRAIN_MARKER,
    QUEUE_FULL,
    QUEUE_OPEN,
    MarkerReader,
)
from minisgl_backend.tritonserver import window
from minisgl_backend.tritonserver.channel import DetokenizerChannel
from minisgl_backend.tritonserver.engine_requests import read_request
from minisgl_backend.tritonserver.llm_engine import TritonPythonModel
from minisgl_backend.wire.acks import Ack, Verdict
from minisgl_backend.wire.defaults import Defaults
from minisgl_backend.wire.generation import Generation, Stopped, TokenPrompt, Wanted
from minisgl_backend.wire.packets import Packet, decode_packet
from minisgl_backend.wire.parse import parse_generation
from minisgl_backend.wire.record import encode_record
from minisgl_bench.paced import paced_engine
from tests.fakes import pb_utils
from tests.fakes.packets import finish_of, token_ids_of
from tests.waiting import PATIENCE_S, wait_until

STEP_S = 0.002
LONG = 50_000  # tokens: nearly two minutes, during which a test ends the request


class Model(TritonPythonModel):
    """The model over a paced engine."""

    engine: ClassVar[Engine]
    """The engine of the model that was loaded last."""

    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        Model.engine = paced_engine(options, step_s=STEP_S)
        return Model.engine


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setenv("MINISGL_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("MINISGL_HTTP_URL", raising=False)
    parameters = {
        "model": DEMO_MODEL,
        "max_sequence_length": "60000",
        "max_running_requests": "4",
        "drain_timeout_s": "0",
    }
    config = {"parameters": {name: {"string_value": v} for name, v in parameters.items()}}
    model = Model()
    threads = set(threading.enumerate())
    model.initialize(
        {
            "model_config": json.dumps(config),
            "model_name": "llm_engine",
            "model_version": "1",
            "model_instance_name": "llm_engine_0_0",
            "model_repository": "/nowhere/llm_engine",
        }
    )
    yield model
    model.finalize()
    left = {t.name for t in threading.enumerate() if t not in threads} - {"parent"}
    assert not left
    assert not list(tmp_path.iterdir())


def test_a_request_is_bounded_in_size(model: Model) -> None:
    """This also holds for direct callers, whose requests no tokenizer has checked."""
    large = request(acknowledged=False, logit_bias="x" * 13_000_000)
    model.execute([large])
    response, final = large.sender.sent.get(timeout=PATIENCE_S)
    assert final and response is not None
    error = response.error()
    assert error is not None
    assert error.message().startswith("INVALID_ARG: a request must be at most")


def test_a_direct_request_may_have_other_defaults() -> None:
    asked = pb_utils.InferenceRequest(
        {"input_ids": np.array([[3, 4]], np.int32)}, parameters={"top_p": 0.5}
    )
    defaults = Defaults({"top_k": 7, "top_p": 0.25})
    parsed, direct = read_request(asked, Limits(), defaults)
    assert direct and isinstance(parsed, Generation)
    assert (parsed.sampling.top_k, parsed.sampling.top_p) == (7, 0.5)


class SlowReader:
    """Reads adapters once it may."""

    def __init__(self) -> None:
        self.may_read = threading.Event()

    def check(self, folder: Path) -> AdapterFacts:
        assert self.may_read.wait(PATIENCE_S)
        return AdapterFacts(8, 1)

    def read(self, adapter_id: int, folder: Path) -> AdapterFacts:
        return self.check(folder)

    def drop(self, adapter_id: int) -> None:
        pass


def test_adapters_are_listed_while_another_is_loaded(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = SlowReader()
    adapters = Adapters(reader, most_in_memory=2)
    monkeypatch.setattr(model.engine, "_adapters", adapters)
    monkeypatch.setattr(model, "_options", replace(model._options, lora_updates=True))
    orders = [{"load": {"name": "sql", "path": "/loras/sql"}}, {}]
    load, listing = (
        pb_utils.InferenceRequest({}, parameters={"lora_order": json.dumps(each)})
        for each in orders
    )
    model.execute([load, listing])
    for asked, names in ((listing, []), (load, ["sql"])):
        response, _ = asked.sender.sent.get(timeout=PATIENCE_S)
        assert response is not None
        (listed,) = outputs(response)["lora_adapters"]
        assert [each["name"] for each in json.loads(listed)] == names
        reader.may_read.set()
    adapters.close()
    (tmp_path / ADAPTERS).unlink()  # which an engine that replaces this one would read


ORDER = {"lora_order": np.array([b"{}"], dtype=object)}


@pytest.mark.parametrize(
    ("inputs", "parameters", "message"),
    [
        ({"input_ids": np.array([1], np.int32)}, {"lora_order": "{}"}, "takes no input_ids"),
        ({**ORDER, "max_tokens": np.array([1], np.int32)}, {}, "takes no max_tokens"),
        (ORDER, {"temprature": 0.5, "timeout": 9}, "takes no temprature"),
        (ORDER, {"lora_order": "{}"}, "is an input or a parameter, not both"),
    ],
)
def test_an_order_stands_alone(
    model: Model, inputs: Any, parameters: dict[str, Any], message: str
) -> None:
    """What stood beside an order was ignored: nothing was generated, and no mistake was told."""
    both = pb_utils.InferenceRequest(inputs, parameters=parameters)
    model.execute([both])
    response, final = both.sender.sent.get(timeout=PATIENCE_S)
    assert final and response is not None
    error = response.error()
    assert error is not None
    assert error.message() == f"INVALID_ARG: lora_order {message}"


def test_an_order_may_have_a_deadline_and_parameters_of_triton(model: Model) -> None:
    """The package's own client tells its deadline with every request, as an input."""
    order = pb_utils.InferenceRequest(
        {**ORDER, "timeout_ms": np.array([60_000], np.int32)},
        parameters={"timeout": 10**9, "triton_x": True},
    )
    model.execute([order])
    response, _ = order.sender.sent.get(timeout=PATIENCE_S)
    assert response is not None and response.error() is None


def request(
    *, request_id: str = "", acknowledged: bool = True, **values: Any
) -> pb_utils.InferenceRequest:
    """A request as the tokenizer sends it, or from a direct caller."""
    ids = np.array([1, 2, 3], dtype=np.int32)
    if not acknowledged:
        return pb_utils.InferenceRequest(
            {"input_ids": ids}, request_id=request_id, parameters=values
        )
    parsed = parse_generation(
        {"input_ids": ids}, values, arrival_time_ns=time.time_ns(), limits=Limits()
    )
    assert isinstance(parsed, Generation) and isinstance(parsed.prompt, TokenPrompt)
    record = encode_record(parsed)
    return pb_utils.InferenceRequest(
        {"input_ids": ids, "request": np.array([record.encode()], dtype=object)},
        request_id=request_id,
    )


def outputs(response: pb_utils.InferenceResponse) -> dict[str, Any]:
    error = response.error()
    assert error is None, error.message() if error else ""
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def packet_of(response: pb_utils.InferenceResponse) -> Packet:
    return decode_packet(outputs(response)["chunk"].tobytes())


class Reader:
    """A detokenizer that acknowledges when told to."""

    def __init__(self, asked: pb_utils.InferenceRequest) -> None:
        self.sender = asked.sender
        self.forgotten: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.channel = DetokenizerChannel(on_forget=self.forgotten.put)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def next(self) -> tuple[Packet, list[int]] | None:
        """The next packet and its tokens; None for a final flag alone."""
        response, _ = self.sender.sent.get(timeout=PATIENCE_S)
        if response is None:
            return None
        packet = packet_of(response)
        return packet, token_ids_of(packet)

    def acknowledge(self, packet: Packet, verdict: Verdict = Verdict.CONTINUE) -> None:
        assert self.channel.acknowledge(packet.reply_to, Ack(packet.key, packet.index, verdict))


def wait_idle(model: Model) -> None:
    wait_until(lambda: model.stats()["num_open"] == model.stats()["num_streams"] == 0)


def wait_open(model: Model, num_open: int) -> None:
    wait_until(lambda: model.stats()["num_open"] == num_open)


def wait_tokens(model: Model, num_tokens: int) -> None:
    wait_until(lambda: model.stats()["num_generated_tokens"] >= num_tokens)


@pytest.fixture
def no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe is sent in between, however slow the machine is."""
    monkeypatch.setattr(window, "PROBE_AFTER_S", 3600.0)


@pytest.mark.usefixtures("no_probes")
def test_tokens_gather_until_the_last_packet_is_acknowledged(model: Model) -> None:
    asked = request(max_tokens=400, stream=True)
    with Reader(asked) as reader:
        model.execute([asked])
        item = reader.next()
        assert item is not None
        first, token_ids = item
        assert first.index == 0 and first.start is not None and first.start.num_input_tokens == 3
        wait_tokens(model, 30)
        assert asked.sender.sent.empty()
        reader.acknowledge(first)
        item = reader.next()
        assert item is not None
        second, more = item
        assert second.index == 1 and second.start is None
        assert len(token_ids) + len(more) >= 29  # the last one may still be on its way
        token_ids += more
        while not second.is_last:
            reader.acknowledge(second)
            item = reader.next()
            assert item is not None
            second, more = item
            token_ids += more
    assert len(token_ids) == 400
    assert finish_of(second) == Finished(FinishReason.LENGTH)
    assert asked.sender.is_final
    wait_idle(model)


@pytest.mark.usefixtures("no_probes")
@pytest.mark.parametrize(
    ("verdict", "counted"),
    [(Verdict.STOP, (0, {})), (Verdict.CANCELLED, (1, {})), (Verdict.FAILED, (0, {"INTERNAL": 1}))],
)
def test_a_verdict_ends_the_request_with_the_final_flag_alone(
    model: Model, verdict: Verdict, counted: tuple[int, dict[str, int]]
) -> None:
    asked = request(max_tokens=LONG, stream=True)
    with Reader(asked) as reader:
        model.execute([asked])
        item = reader.next()
        assert item is not None
        reader.acknowledge(item[0], verdict)
        assert reader.next() is None
        wait_idle(model)
        assert reader.forgotten.get(timeout=PATIENCE_S) == item[0].key
    stats = model.stats()
    assert (stats["num_cancelled"], stats["failed"]) == counted


def test_probes_while_nothing_is_to_be_sent(model: Model) -> None:
    """Without streaming, tokens wait for the end; probes ask whether the client still listens."""
    asked = request(max_tokens=LONG)
    with Reader(asked) as reader:
        model.execute([asked])
        for index in range(3):
            item = reader.next()
            assert item is not None
            packet, token_ids = item
            assert packet.index == index and not token_ids and not packet.is_last
            reader.acknowledge(packet)
        item = reader.next()
        assert item is not None
        reader.acknowledge(item[0], Verdict.CANCELLED)
        assert reader.next() is None
    wait_idle(model)


def test_a_detokenizer_that_goes_ends_its_requests_with_an_error(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(request_id="job", max_tokens=LONG, stream=True)
    with Reader(asked) as reader:
        model.execute([asked])
        item = reader.next()
        assert item is not None
        reader.acknowledge(item[0])
    message = ""
    while not message:
        response, _ = asked.sender.sent.get(timeout=PATIENCE_S)
        assert response is not None
        error = response.error()
        message = error.message() if error else ""
    assert message == "INTERNAL: the detokenizer has gone"
    wait_idle(model)
    stats = model.stats()
    assert (stats["num_cancelled"], stats["failed"]) == (0, {"INTERNAL": 1})
    told = [record.message for record in caplog.records if "failed after" in record.message]
    assert [text.split(" (")[0] for text in told] == ["request 'job'"]


def test_a_missing_acknowledgement_while_others_come(model: Model) -> None:
    """A stream whose packets get lost is given up, and the others go on."""
    lost, other = request(max_tokens=LONG, stream=True), request(max_tokens=LONG, stream=True)
    with Reader(lost) as loser, Reader(other) as reader:
        model.execute([lost])
        assert loser.next() is not None
        model.execute([other])
        while not lost.sender.is_final:
            item = reader.next()
            assert item is not None
            reader.acknowledge(item[0])
            last = item[0]
        reader.acknowledge(last, Verdict.CANCELLED)
    wait_idle(model)
    stats = model.stats()
    assert (stats["num_cancelled"], stats["failed"]) == (1, {"INTERNAL": 1})


def test_a_direct_caller_gets_tokens(model: Model) -> None:
    asked = request(
        acknowledged=False,
        max_tokens=20,
        stream=True,
        return_finish_reason=True,
        return_num_cached_tokens=True,
        return_num_input_tokens=True,
    )
    model.execute([asked])
    token_ids, reasons, final = [], [], False
    while not final:
        response, final = asked.sender.sent.get(timeout=PATIENCE_S)
        assert response is not None
        arrays = outputs(response)
        token_ids += arrays["output_ids"].tolist()
        reasons.append(arrays["finish_reason"].item())
        assert arrays["num_input_tokens"].item() == 3
    assert len(token_ids) == 20
    assert set(reasons[:-1]) == {b"None"} and reasons[-1] == b"length"
    wait_idle(model)


def test_a_full_queue_shows_its_room_before_the_last_response(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model.engine, "is_queue_full", lambda: model.stats()["num_open"] > 0)
    asked = request(acknowledged=False, max_tokens=LONG)
    model.execute([asked])
    wait_until(lambda: bool(list(tmp_path.glob(f"{QUEUE_FULL}.*"))))
    asked.sender.cancelled = True
    _, final = asked.sender.sent.get(timeout=PATIENCE_S)
    assert final and list(tmp_path.glob(f"{QUEUE_OPEN}.*"))


def test_the_marker_says_what_a_request_may_have(model: Model, tmp_path: Path) -> None:
    assert MarkerReader(tmp_path).most_tokens() == 60_000
    options = replace(model._options, num_pages=256)  # the last token needs no place in them
    small = paced_engine(options, step_s=STEP_S)
    small.close(drain_s=0)
    assert small.most_tokens == 256 * options.page_size + 1


def test_a_direct_caller_who_gives_up(model: Model) -> None:
    asked = request(acknowledged=False, max_tokens=LONG)
    model.execute([asked])
    asked.sender.cancelled = True
    response, final = asked.sender.sent.get(timeout=PATIENCE_S)
    assert final and response is not None
    wait_idle(model)
    assert model.stats()["num_cancelled"] == 1


def test_streams_that_cannot_be_asked_hold_up_no_other(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_cancelled() -> bool:
        raise RuntimeError("no room in shared memory")

    *asked, other = (request(acknowledged=False, max_tokens=LONG) for _ in range(10))
    with monkeypatch.context() as patch:
        for one in asked:
            patch.setattr(one.sender, "is_cancelled", is_cancelled)
        model.execute([*asked, other])
        other.sender.cancelled = True
        _, final = other.sender.sent.get(timeout=PATIENCE_S)
        assert final
        wait_until(lambda: "could not be checked" in caplog.text)  # the other may have come first
    lines = [record for record in caplog.records if "could not be checked" in record.message]
    assert 0 < len(lines) < len(asked)
    for one in asked:
        one.sender.cancelled = True
    wait_idle(model)


def test_a_request_that_was_stopped_in_the_tokenizer(model: Model) -> None:
    """It ends like one that was stopped later, and leaves others with its id alone."""
    other = request(request_id="job", acknowledged=False, max_tokens=LONG)
    record = encode_record(Stopped(wanted=Wanted(finish_reason=True)))
    arrays = {
        "input_ids": np.empty(0, dtype=np.int32),
        "request": np.array([record.encode()], dtype=object),
    }
    stopped = pb_utils.InferenceRequest(arrays, request_id="job")
    model.execute([other, stopped])
    response, final = stopped.sender.sent.get(timeout=PATIENCE_S)
    assert final and response is not None
    packet = packet_of(response)
    assert finish_of(packet) == Finished(FinishReason.CANCELLED)
    assert packet.start is not None and packet.start.wanted == Wanted(finish_reason=True)
    assert model.stats()["num_cancelled"] == 1
    wait_open(model, 1)
    other.sender.cancelled = True
    wait_idle(model)


@pytest.mark.parametrize("acknowledged", [True, False])
def test_ids_parameters_and_texts_that_are_not_utf_8_are_refused(
    model: Model, acknowledged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    good = request(acknowledged=acknowledged)
    arrays = {tensor.name(): tensor.as_numpy() for tensor in good.inputs()}
    text = np.array([b'{"unload": "\xff"}'], dtype=object)
    for bad, what in (
        (pb_utils.InferenceRequest(arrays, parameters=b'{"user": "\xff"}'), "request parameters"),
        (pb_utils.InferenceRequest(arrays, request_id=b"job \xff"), "the request id"),
        (pb_utils.InferenceRequest({"lora_order": text}), "lora_order"),
        (pb_utils.InferenceRequest({**arrays, "request": text}), "request"),
    ):
        model.execute([bad])
        response, final = bad.sender.sent.get(timeout=PATIENCE_S)
        error = response.error() if response is not None else None
        assert final and error is not None
        assert error.message() == f"INVALID_ARG: {what} must be valid UTF-8"
    assert not caplog.records
    wait_idle(model)


@pytest.mark.parametrize("acknowledged", [True, False])
def test_stop_request(model: Model, acknowledged: bool) -> None:
    asked = request(request_id="job", acknowledged=acknowledged, max_tokens=LONG)
    other = request(request_id="other", acknowledged=False, max_tokens=LONG)
    stop = pb_utils.InferenceRequest({}, request_id="job", parameters={"stop_request": True})
    model.execute([asked, other])
    model.execute([stop])
    response, final = stop.sender.sent.get(timeout=PATIENCE_S)
    assert final and response is not None
    assert outputs(response)["finish_reason"].item() == b"cancelled"
    final = False
    while not final:
        response, final = asked.sender.sent.get(timeout=PATIENCE_S)
    assert response is not None
    if acknowledged:
        assert finish_of(packet_of(response)) == Finished(FinishReason.CANCELLED)
    wait_open(model, 1)
    other.sender.cancelled = True
    wait_idle(model)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request(acknowledged=False, max_tokens=0), "INVALID_ARG: max_tokens"),
        (request(acknowledged=False, stop="x"), "UNSUPPORTED: stop"),
        (request(max_tokens=100_000), "INVALID_ARG: max_tokens 100000"),
        (
            pb_utils.InferenceRequest({}, parameters={"stop_request": True}),
            "INVALID_ARG: stop_request needs the request id",
        ),
        (
            pb_utils.InferenceRequest({"request": np.array([b"{}"], dtype=object)}),
            "INVALID_ARG: request goes with input_ids",
        ),
        (
            pb_utils.InferenceRequest(  # a shape that Triton lets no client send
                {"input_ids": np.array([1]), "request": np.array([], dtype=object)}
            ),
            "INTERNAL: internal error",
        ),
    ],
)
def test_refusals(model: Model, asked: pb_utils.InferenceRequest, message: str) -> None:
    model.execute([asked])
    response, final = asked.sender.sent.get(timeout=PATIENCE_S)
    assert final and response is not None
    error = response.error()
    assert error is not None and error.message().startswith(message)
    assert model.stats()["num_streams"] == 0


def test_refusals_are_counted_once(model: Model) -> None:
    refused = {"max_tokens": 0}, {"max_tokens": 100_000}, {"stop": "x"}, {"lora_name": "sql"}
    model.execute([request(acknowledged=False, **given) for given in refused])
    wait_until(lambda: model.stats()["rejected"] == {"invalid": 2, "unsupported": 2})


def test_a_request_that_is_given_up_on_its_way_into_the_engine_ends(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ignores an abort of a request that it does not know yet."""
    submit = model.engine.submit_samples
    asked = request(max_tokens=LONG, stream=True)
    earlier = request(max_tokens=LONG, stream=True)

    def late(wanted: Sequence[Request], sinks: Sequence[Sink]) -> None:
        reader.channel.close()
        wait_until(lambda: asked.sender.is_final)
        submit(wanted, sinks)

    reader = Reader(earlier)
    model.execute([earlier])
    item = reader.next()
    assert item is not None
    reader.acknowledge(item[0])  # so that the engine knows a detokenizer that can go
    monkeypatch.setattr(model.engine, "submit_samples", late)
    model.execute([asked])
    response, final = asked.sender.sent.get(timeout=PATIENCE_S)
    error = response.error() if response else None
    assert final and error is not None and error.message() == "INTERNAL: the detokenizer has gone"
    wait_idle(model)
    assert model.stats()["num_generated_tokens"] < LONG


@pytest.mark.parametrize("acknowledged", [True, False])
def test_an_engine_that_breaks_as_a_request_comes_leaves_no_stream(
    model: Model, monkeypatch: pytest.MonkeyPatch, acknowledged: bool
) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(model.engine, "submit_samples", submit)
    asked = request(acknowledged=acknowledged)
    model.execute([asked])
    response, final = asked.sender.sent.get(timeout=PATIENCE_S)
    error = response.error() if response else None
    assert final and error is not None and error.message().startswith("INTERNAL: internal error")
    assert model.stats()["num_streams"] == 0


def test_draining_ends_what_is_open(model: Model, tmp_path: Path) -> None:
    """The fixture's ``finalize`` then leaves no thread, file or request."""
    asked = [request(max_tokens=LONG, stream=True), request(acknowledged=False, max_tokens=LONG)]
    model.execute(list(asked))
    (tmp_path / DRAIN_MARKER).touch()
    for one in asked:
        final = False
        while not final:
            response, final = one.sender.sent.get(timeout=PATIENCE_S)
        assert response is not None
    error = response.error() if response else None
    assert error is not None and error.message().startswith("UNAVAILABLE: the server is")
    assert not model.is_ready()
    (tmp_path / DRAIN_MARKER).unlink()
    stop = pb_utils.InferenceRequest({}, request_id="none", parameters={"stop_request": True})
    for late in (request(acknowledged=False), stop):
        model.execute([late])
        response, final = late.sender.sent.get(timeout=PATIENCE_S)
        error = response.error() if response else None
        assert final and error is not None and error.message().startswith("UNAVAILABLE: ")


def test_is_ready(model: Model) -> None:
    assert model.is_ready()
