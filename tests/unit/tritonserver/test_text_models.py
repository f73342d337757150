"""The models ``tokenizer`` and ``detokenizer``, with the demo model's files and a fake Triton."""

from __future__ import annotations

import json
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from minisgl_backend import runtime_files
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.errors import Overloaded
from minisgl_backend.limits import Limits
from minisgl_backend.request import Finished, FinishReason, IntArray
from minisgl_backend.runtime_files import QueueMarker
from minisgl_backend.text.answer_stream import AnswerStream
from minisgl_backend.text.tokenizer import PromptEncoder, RenderedPrompt
from minisgl_backend.tritonserver.channel import EngineChannel
from minisgl_backend.tritonserver.detokenizer import TritonPythonModel as Detokenizer
from minisgl_backend.tritonserver.tokenizer import TritonPythonModel as Tokenizer
from minisgl_backend.wire.acks import Ack, Verdict
from minisgl_backend.wire.answer import Answer
from minisgl_backend.wire.arrays import bytes_array
from minisgl_backend.wire.generation import (
    Generation,
    Stopped,
    StopRequest,
    TextPrompt,
    Wanted,
)
from minisgl_backend.wire.packets import Packet, StreamStart, encode_packet
from minisgl_backend.wire.record import decode_record
from tests.fakes import pb_utils
from tests.fakes.packets import make_packet
from tests.waiting import PATIENCE_S, wait_until


def text(value: str | bytes) -> np.ndarray[Any, Any]:
    array = np.empty(1, dtype=object)
    array[0] = value.encode() if isinstance(value, str) else value
    return array


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose `llm_engine` names the demo model and small queues."""
    options = {"model": DEMO_MODEL, "max_running_requests": "2", "max_queued_requests": "1"}
    lines = [
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        for name, value in options.items()
    ]
    folder = tmp_path / "repository" / "llm_engine"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return folder.parent


def args(repository: Path, name: str) -> dict[str, str]:
    return {
        "model_repository": str(repository / name),
        "model_config": "{}",
        "model_name": name,
        "model_version": "1",
    }


def answer_of(request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse | None:
    response, _ = request.sender.sent.get(timeout=PATIENCE_S)
    assert request.sender.is_final
    return response


def outputs(response: pb_utils.InferenceResponse | None) -> dict[str, Any]:
    assert response is not None
    error = response.error()
    assert error is None, error.message() if error else ""
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def message_of(response: pb_utils.InferenceResponse | None) -> str:
    assert response is not None
    error = response.error()
    assert error is not None
    return error.message()


# --- tokenizer ---------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Tokenizer]:
    monkeypatch.setenv("MINISGL_RUNTIME_DIR", str(tmp_path))
    model = Tokenizer()
    model.initialize(args(repository, "tokenizer"))
    yield model
    model.finalize()


def test_text_becomes_ids_and_a_record(tokenizer: Tokenizer) -> None:
    request = pb_utils.InferenceRequest(
        {"text_input": text("Hello"), "max_tokens": np.array([5], dtype=np.int32)},
        parameters={"temperature": "0.5"},
        timeout_us=2_000_000,
    )
    before_ns = time.time_ns()
    tokenizer.execute([request])
    arrays = outputs(answer_of(request))
    ids = arrays["input_ids"]
    assert ids.tolist() == PromptEncoder.load(DEMO_MODEL).encode(TextPrompt("Hello")).tolist()
    record = decode_record(arrays["request"].item().decode(), ids, Limits())
    assert isinstance(record, Generation)
    assert record.sampling.max_tokens == 5
    assert record.sampling.temperature == 0.5
    assert record.timeout_ms == 2000
    assert before_ns <= record.arrival_time_ns <= time.time_ns()


def test_what_requests_leave_out_may_be_as_the_model_recommends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with the option, and never in place of what a request says."""
    monkeypatch.setenv("MINISGL_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "model"
    shutil.copytree(Path(DEMO_MODEL), folder)
    advice = {"temperature": 0.75, "top_p": 0.875, "top_k": 20, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(advice))
    config = tmp_path / "repository" / "llm_engine" / "config.pbtxt"
    config.parent.mkdir(parents=True)
    found = []
    for option in ("request", "model"):
        values = {"model": str(folder), "sampling_defaults": option}
        lines = [
            f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
            for name, value in values.items()
        ]
        config.write_text("\n".join(lines))
        model = Tokenizer()
        model.initialize(args(config.parent.parent, "tokenizer"))
        request = pb_utils.InferenceRequest(
            {"text_input": text("Hello")}, parameters={"top_p": "0.5"}
        )
        model.execute([request])
        arrays = outputs(answer_of(request))
        record = decode_record(arrays["request"].item().decode(), arrays["input_ids"], Limits())
        assert isinstance(record, Generation)
        sampling = record.sampling
        found.append((sampling.temperature, sampling.top_p, sampling.top_k))
        model.finalize()
    assert found == [(1.0, 0.5, 0), (0.75, 0.5, 20)]


def test_errors_reach_the_client(tokenizer: Tokenizer) -> None:
    requests = [
        pb_utils.InferenceRequest({}),
        pb_utils.InferenceRequest({"text_input": text("x")}, parameters={"suffix": "3"}),
        pb_utils.InferenceRequest({"text_input": text(b"\xff")}),
        pb_utils.InferenceRequest({"text_input": text(b"x" * 13_000_000)}),
        pb_utils.InferenceRequest({"input_ids": np.zeros(3_200_000, dtype=np.int32)}),
        pb_utils.InferenceRequest({"input_ids": np.zeros(9000, dtype=np.int32)}),
        pb_utils.InferenceRequest({"text_input": text(b"lorem ipsum " * 500_000)}),
    ]
    messages = []
    for request in requests:  # one by one, since the queue has no room for all of them
        tokenizer.execute([request])
        messages.append(message_of(answer_of(request)))
    assert messages[0].startswith("INVALID_ARG: give one of")
    assert messages[1].startswith("UNSUPPORTED: suffix is")
    assert messages[2].startswith("INVALID_ARG: ")
    assert messages[3].startswith("INVALID_ARG: a request must be at most")
    assert messages[4].startswith("INVALID_ARG: prompt of 3200000 tokens is too long")
    assert messages[5] == "INVALID_ARG: prompt of 9000 tokens does not fit the context of 8192"
    assert messages[6].startswith("INVALID_ARG: prompt of 6000000 bytes does not fit the context")


def test_a_client_that_asks_alone_is_told_the_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """However full the queues and however long the text."""
    encoder = PromptEncoder.load(DEMO_MODEL)
    QueueMarker(tmp_path, "a", 8192).show(True)
    words = "lorem ipsum " * 10_000
    for value in ("Hello<|im_end|>", "", words):
        request = pb_utils.InferenceRequest(
            {"text_input": text(value), "parse_special_tokens": np.array([True])},
            outputs=["input_ids", "token_strs", "text", "max_sequence_length", "chat_format"],
        )
        tokenizer.execute([request])
        arrays = outputs(answer_of(request))
        ids = arrays["input_ids"]
        assert arrays["text"].item().decode() == value
        strs = [name.decode() for name in arrays["token_strs"]]
        assert strs == [encoder.vocabulary.names[token_id] for token_id in ids.tolist()]
        assert arrays["max_sequence_length"].tolist() == [8192]
        assert arrays["chat_format"].item() == b"null"
    assert len(ids) > 8192


def test_a_client_that_asks_alone_is_told_what_pages_have_room_for(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the context, as long as no engine says that its pages hold fewer tokens."""
    monkeypatch.setattr(runtime_files, "MARKERS_READ_EVERY_S", 0.0)

    def told() -> int:
        request = pb_utils.InferenceRequest(
            {"text_input": text("x")}, outputs=["max_sequence_length"]
        )
        tokenizer.execute([request])
        return int(outputs(answer_of(request))["max_sequence_length"].item())

    assert told() == 8192
    markers = [QueueMarker(tmp_path, "a", 4097), QueueMarker(tmp_path, "b", 8192)]
    markers[0].show(True)
    assert told() == 4097
    markers[0].remove()
    assert told() == 8192


def test_a_client_that_asks_alone_is_told_the_format_of_a_chat(tokenizer: Tokenizer) -> None:
    messages = text('[{"role": "user", "content": "Hello"}]')
    request = pb_utils.InferenceRequest({"messages": messages}, outputs=["chat_format"])
    tokenizer.execute([request])
    told = json.loads(outputs(answer_of(request))["chat_format"].item())
    assert told["tool_dialect"] is told["thinking"] is None
    assert told["begins_thinking"] is False
    assert {"messages", "tools"} <= set(told["variables"])


def test_ids_and_parameters_that_are_not_utf_8_are_refused(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton's HTTP frontend lets them through."""
    fields = {"text_input": text("x")}
    requests = [
        pb_utils.InferenceRequest(fields, parameters=b'{"cache_salt": "\xff"}'),
        pb_utils.InferenceRequest(fields, request_id=b"job \xff"),
    ]
    tokenizer.execute(list(requests))
    assert [message_of(answer_of(request)) for request in requests] == [
        "INVALID_ARG: request parameters must be valid UTF-8",
        "INVALID_ARG: the request id must be valid UTF-8",
    ]
    assert not caplog.records
    assert tokenizer._status._heartbeat is not None
    beat = runtime_files.read_beat(tokenizer._status._heartbeat.path)
    assert beat is not None and beat.num_inside == 0


def test_a_tokenizer_with_more_tokens_than_the_model_fails_the_load(
    repository: Path, tmp_path: Path
) -> None:
    """Tokens that were added to the tokenizer also count."""
    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((Path(DEMO_MODEL) / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 2040}))
    path = repository / "llm_engine" / "config.pbtxt"
    told = path.read_text().replace(DEMO_MODEL, str(model))
    path.write_text(
        f'{told}\nparameters {{ key: "tokenizer" value {{ string_value: "{DEMO_MODEL}" }} }}'
    )
    with pytest.raises(pb_utils.TritonModelException) as caught:
        Tokenizer().initialize(args(repository, "tokenizer"))
    message = (
        "the tokenizer has 8 tokens that the model, of 2040 embeddings, does not know: the first is"
    )
    assert str(caught.value).startswith(message)
    assert str(caught.value).endswith("of id 2040, the last has id 2047")


def test_a_server_in_recovery_is_spared(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "recovering").touch()
    request = pb_utils.InferenceRequest({"text_input": text("x")})
    tokenizer.execute([request])
    message = message_of(answer_of(request))
    assert message == "UNAVAILABLE: a part of the server died and is being started again"


def test_full_engines_are_spared(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer refuses before it tokenizes if every engine shows that its queue is full."""
    monkeypatch.setattr(runtime_files, "MARKERS_READ_EVERY_S", 0.0)
    markers = [QueueMarker(tmp_path, "a", 8192), QueueMarker(tmp_path, "b", 8192)]

    def ask() -> pb_utils.InferenceResponse | None:
        request = pb_utils.InferenceRequest({"text_input": text("x")})
        tokenizer.execute([request])
        return answer_of(request)

    markers[0].show(True)
    outputs(ask())
    markers[1].show(True)
    assert message_of(ask()).startswith("UNAVAILABLE: queue full")
    for more in ({}, {"sampling_parameters": '{"max_tokens": 5}'}):
        parameters = {"stop_request": True, **more}
        stop = pb_utils.InferenceRequest({}, request_id="a", parameters=parameters)
        tokenizer.execute([stop])
        outputs(answer_of(stop))
    markers[0].show(False)
    outputs(ask())
    for marker in markers:
        marker.remove()
    outputs(ask())


def test_the_pool_is_bounded_and_a_stop_request_ends_what_waits_in_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()
    encode = PromptEncoder.encode

    def slow(self: PromptEncoder, prompt: RenderedPrompt, most_tokens: int | None) -> IntArray:
        entered.set()
        assert leave.wait(PATIENCE_S)
        return encode(self, prompt, most_tokens)

    monkeypatch.setattr(PromptEncoder, "encode", slow)
    waiting = [
        pb_utils.InferenceRequest(
            {"text_input": text("x")}, request_id=label, parameters={"return_finish_reason": True}
        )
        for label in ("job", "other")
    ]
    stop = pb_utils.InferenceRequest({}, request_id="job", parameters={"stop_request": True})
    tokenizer.execute([waiting[0]])
    assert entered.wait(PATIENCE_S)
    tokenizer.execute([stop])
    arrays = outputs(answer_of(stop))
    record = decode_record(arrays["request"].item().decode(), arrays["input_ids"], Limits())
    assert isinstance(record, StopRequest)
    tokenizer.execute([waiting[1]])
    more = [pb_utils.InferenceRequest({"text_input": text("x")}) for _ in range(4)]
    tokenizer.execute(list(more))
    assert message_of(answer_of(more[-1])).startswith("UNAVAILABLE: queue full: 3 requests")
    again = pb_utils.InferenceRequest({}, request_id="more", parameters={"stop_request": True})
    tokenizer.execute([again])
    outputs(answer_of(again))
    leave.set()
    arrays = outputs(answer_of(waiting[0]))
    record = decode_record(arrays["request"].item().decode(), arrays["input_ids"], Limits())
    assert record == Stopped(wanted=Wanted(finish_reason=True))
    outputs(answer_of(waiting[1]))


def test_a_stop_request_follows_what_is_being_sent(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it reached the engine before the request, it would stop nothing."""
    request = pb_utils.InferenceRequest({"text_input": text("x")}, request_id="job")
    stop = pb_utils.InferenceRequest({}, request_id="job", parameters={"stop_request": True})
    stopping = threading.Thread(target=tokenizer.execute, args=([stop],))
    send, order = request.sender.send, []

    def slow(response: Any, flags: int) -> None:
        stopping.start()
        stopping.join(0.2)  # which is enough to get ahead
        order.append(stop.sender.num_sent)
        send(response, flags)

    monkeypatch.setattr(request.sender, "send", slow)
    tokenizer.execute([request])
    outputs(answer_of(request))
    outputs(answer_of(stop))
    stopping.join(PATIENCE_S)
    assert order == [0]


# --- detokenizer -------------------------------------------------------------------------------


class Engine:
    """An engine that a detokenizer hears from and answers."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel = EngineChannel(
            on_ack=self.heard.put, on_detokenizer_gone=lambda: self.heard.put("gone")
        )
        self.ids = PromptEncoder.load(DEMO_MODEL).encode(TextPrompt("Grüße 🙂 and more"))

    def request(
        self, index: int, token_ids: list[int], *, key: int = 1, **more: Any
    ) -> pb_utils.InferenceRequest:
        if index == 0:
            more.setdefault("start", StreamStart(num_input_tokens=3, stream=True))
        packet = make_packet(self.channel.path, key, index, token_ids, **more)
        return pb_utils.InferenceRequest({"chunk": bytes_array(encode_packet(packet))})

    def ack(self) -> Ack:
        ack = self.heard.get(timeout=PATIENCE_S)
        assert isinstance(ack, Ack)
        return ack


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.channel.close()


@pytest.fixture
def detokenizer(repository: Path) -> Iterator[Detokenizer]:
    model = Detokenizer()
    model.initialize(args(repository, "detokenizer"))
    yield model
    model.finalize()


def take(detokenizer: Detokenizer, request: pb_utils.InferenceRequest) -> Any:
    detokenizer.execute([request])
    return answer_of(request)


def test_packets_become_text_and_are_acknowledged(detokenizer: Detokenizer, engine: Engine) -> None:
    said = ""
    for index, token_id in enumerate(engine.ids.tolist()):
        response = take(detokenizer, engine.request(index, [token_id]))
        if response is not None:  # half a character is nothing to say
            said += outputs(response)["text_output"].item().decode()
        assert engine.ack() == Ack(1, index, Verdict.CONTINUE)
    last = engine.request(len(engine.ids), [], finish=Finished(FinishReason.LENGTH))
    said += outputs(take(detokenizer, last))["text_output"].item().decode()
    assert said == "Grüße 🙂 and more"
    assert detokenizer.stats()["num_streams"] == 0


def test_a_probe_is_answered_with_nothing(detokenizer: Detokenizer, engine: Engine) -> None:
    assert take(detokenizer, engine.request(0, [])) is None
    assert engine.ack() == Ack(1, 0, Verdict.CONTINUE)


def test_a_stop_string_ends_the_stream(detokenizer: Detokenizer, engine: Engine) -> None:
    start = StreamStart(num_input_tokens=1, stream=True, stop_strings=(" and",))
    response = take(detokenizer, engine.request(0, engine.ids.tolist(), start=start))
    assert outputs(response)["text_output"].item().decode() == "Grüße 🙂"
    assert engine.ack() == Ack(1, 0, Verdict.STOP)
    # the engine did not know it yet
    assert take(detokenizer, engine.request(1, [5])) is None
    assert engine.ack() == Ack(1, 1, Verdict.STOP)
    engine.channel.forget(1)
    wait_until(lambda: detokenizer.stats()["num_streams"] == 0)


def test_a_cancelled_client(
    detokenizer: Detokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is asked occasionally, not for each packet."""
    clock = SimpleNamespace()
    monkeypatch.setattr("minisgl_backend.tritonserver.detokenizer.time", clock)
    for index, now_s, verdict in (
        (0, 0.0, Verdict.CONTINUE),
        (1, 0.1, Verdict.CONTINUE),
        (2, 0.3, Verdict.CANCELLED),
        (3, 0.4, Verdict.CANCELLED),
    ):
        clock.monotonic = lambda now_s=now_s: now_s
        request = engine.request(index, engine.ids.tolist())
        request.sender.cancelled = True
        response = take(detokenizer, request)
        assert (response is None) is (verdict is Verdict.CANCELLED)
        assert engine.ack() == Ack(1, index, verdict)
    last = engine.request(4, [], finish=Finished(FinishReason.CANCELLED))
    assert take(detokenizer, last) is None
    assert detokenizer.stats()["num_streams"] == 0


def test_with_many_streams_each_client_is_asked_for_less_often(
    detokenizer: Detokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace()
    monkeypatch.setattr("minisgl_backend.tritonserver.detokenizer.time", clock)
    monkeypatch.setattr("minisgl_backend.tritonserver.detokenizer._MOST_POLLS_PER_S", 1)

    def polled(index: int, now_s: float) -> bool:
        clock.monotonic = lambda: now_s
        request = engine.request(index, [5])
        asked = []

        def is_cancelled() -> bool:
            asked.append(now_s)
            return False

        request.sender.is_cancelled = is_cancelled  # type: ignore[method-assign]
        take(detokenizer, request)
        return bool(asked)

    assert not polled(0, 0.0)
    clock.monotonic = lambda: 0.0
    for key in (2, 3):
        take(detokenizer, engine.request(0, [5], key=key))
    assert polled(1, 0.3)
    assert not polled(2, 3.2)  # with three streams, each is due after 3 s
    assert polled(3, 3.4)


def test_a_response_that_takes_long_holds_up_its_own_lane_alone(
    detokenizer: Detokenizer, engine: Engine
) -> None:
    """The packets of one stream stay in order, although each is acknowledged before its answer."""
    goes_on = threading.Event()
    slow, next_one = engine.request(0, engine.ids.tolist()), engine.request(1, [5])
    send = slow.sender.send

    def waiting(*response: Any, **flags: Any) -> None:
        assert goes_on.wait(PATIENCE_S)
        send(*response, **flags)

    slow.sender.send = waiting  # type: ignore[method-assign]
    detokenizer.execute([slow])
    assert engine.ack() == Ack(1, 0, Verdict.CONTINUE)
    detokenizer.execute([next_one])
    for key in range(2, 20, 2):  # even and odd keys are on different lanes
        take(detokenizer, engine.request(0, [], key=key))
        assert engine.ack() == Ack(key, 0, Verdict.CONTINUE)
    assert not next_one.sender.num_sent
    goes_on.set()
    assert outputs(answer_of(slow))["text_output"].item().decode() == "Grüße 🙂 and more"
    answer_of(next_one)
    assert engine.ack() == Ack(1, 1, Verdict.CONTINUE)


def test_a_stream_that_is_not_known(detokenizer: Detokenizer, engine: Engine) -> None:
    assert message_of(take(detokenizer, engine.request(4, [5]))).startswith("INTERNAL: ")
    assert engine.ack() == Ack(1, 4, Verdict.FAILED)


def test_an_error_of_the_engine(detokenizer: Detokenizer, engine: Engine) -> None:
    take(detokenizer, engine.request(0, []))
    failed = engine.request(1, [], error=Overloaded("too late"))
    assert message_of(take(detokenizer, failed)) == "UNAVAILABLE: too late"
    assert detokenizer.stats()["num_streams"] == 0


def test_a_failure_on_one_stream_stays_with_it(
    detokenizer: Detokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(detokenizer, engine.request(0, [], key=1))
    take(detokenizer, engine.request(0, [], key=2))
    engine.ack(), engine.ack()
    push = AnswerStream.push

    def breaking(self: AnswerStream, packet: Packet) -> Answer | None:
        assert packet.key != 1
        return push(self, packet)

    monkeypatch.setattr(AnswerStream, "push", breaking)
    told = message_of(take(detokenizer, engine.request(1, [5], key=1)))
    assert told.startswith("INTERNAL: internal error")
    assert engine.ack() == Ack(1, 1, Verdict.FAILED)
    take(detokenizer, engine.request(1, [5], key=2))
    assert engine.ack() == Ack(2, 1, Verdict.CONTINUE)


def test_packets_that_arrive_after_the_end_of_their_engine(detokenizer: Detokenizer) -> None:
    """They were on their way through Triton: a packet, a probe and the last packet."""
    engine = Engine()
    take(detokenizer, engine.request(0, []))
    engine.ack()
    late = engine.request(1, engine.ids.tolist())
    probe = engine.request(2, [])
    last = engine.request(3, [], finish=Finished(FinishReason.LENGTH))
    engine.channel.close()
    wait_until(lambda: detokenizer.stats()["num_engines"] == 0)
    assert outputs(take(detokenizer, late))["text_output"].item().decode() == "Grüße 🙂 and more"
    assert take(detokenizer, probe) is None
    assert take(detokenizer, last).error() is None
    assert detokenizer.stats()["num_streams"] == 0


def test_streams_of_which_nothing_is_heard_are_forgotten(
    detokenizer: Detokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that are still heard from stay, however long ago they began."""
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("minisgl_backend.tritonserver.detokenizer.time", clock)
    for key in (1, 2):
        take(detokenizer, engine.request(0, [], key=key))
    now_s = 50.0
    take(detokenizer, engine.request(1, [], key=1))
    assert detokenizer.stats()["num_streams"] == 2
    now_s = 70.0
    take(detokenizer, engine.request(0, [], key=3))
    assert detokenizer.stats()["num_streams"] == 2
    assert take(detokenizer, engine.request(2, [], key=1)) is None
    assert "lost this request" in message_of(take(detokenizer, engine.request(1, [], key=2)))


@pytest.mark.parametrize(
    "changes",
    [{"s": -1}, {"s": 2**64}, {"s": "1"}, {"i": -1}, {"i": 2**32}, {"i": 2**70}, {"r": "\0"}],
)
def test_a_forged_packet_harms_no_other_stream(
    detokenizer: Detokenizer, engine: Engine, changes: dict[str, Any]
) -> None:
    """It names the engine's socket, and perhaps a number too large for an acknowledgement."""
    take(detokenizer, engine.request(0, [], key=1))
    assert engine.ack() == Ack(1, 0, Verdict.CONTINUE)
    forged = {"r": engine.channel.path, "s": 2, "i": 0, "d": {"n": 1}} | changes
    request = pb_utils.InferenceRequest({"chunk": bytes_array(json.dumps(forged).encode())})
    take(detokenizer, request)
    take(detokenizer, engine.request(1, [5], key=1))
    assert engine.ack() == Ack(1, 1, Verdict.CONTINUE)
    # a well-formed packet from an unreachable engine stays until it has been silent for too long
    assert detokenizer.stats()["num_streams"] == (2 if "r" in changes else 1)


@pytest.mark.parametrize("chunk", ["{}", "null", json.dumps({"r": "x", "s": "no.key", "i": 3})])
def test_garbage(detokenizer: Detokenizer, chunk: str) -> None:
    request = pb_utils.InferenceRequest({"chunk": bytes_array(chunk.encode())})
    message = message_of(take(detokenizer, request))
    assert message.startswith(("INVALID_ARG: ", "INTERNAL: the detokenizer"))
