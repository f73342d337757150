"""The side channel: its messages, coalescing, and both ends over real sockets."""

from __future__ import annotations

import errno
import os
import queue
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.tritonserver import channel
from minisgl_backend.tritonserver.channel import (
    MAX_PATH_BYTES,
    AckQueue,
    DetokenizerChannel,
    EngineChannel,
    ForgetQueue,
)
from minisgl_backend.tritonserver.reactor import Peer, Reactor
from minisgl_backend.wire.acks import (
    Ack,
    Verdict,
    decode_acks,
    decode_keys,
    encode_acks,
    encode_keys,
)
from tests.waiting import PATIENCE_S, wait_until

U64 = st.integers(0, 2**64 - 1)
ACKS = st.builds(Ack, U64, st.integers(0, 2**32 - 1), st.sampled_from(Verdict))


@given(st.lists(ACKS))
def test_acks_come_back(acks: list[Ack]) -> None:
    assert decode_acks(encode_acks(acks)) == acks


@given(st.lists(U64))
def test_forgets_come_back(keys: list[int]) -> None:
    assert decode_keys(encode_keys(keys)) == keys


@given(st.binary(max_size=40))
def test_garbage_is_a_struct_or_value_error(message: bytes) -> None:
    try:
        decode_acks(message)
    except (struct.error, ValueError):
        return
    assert len(message) % 13 == 0


@given(st.lists(st.builds(Ack, st.integers(0, 5), st.integers(0, 9), st.sampled_from(Verdict))))
def test_waiting_acks_coalesce(acks: list[Ack]) -> None:
    """One stays per stream, with the newest index and the first verdict other than `continue`."""
    waiting = AckQueue()
    for ack in acks:
        waiting.put(ack)
    expected: dict[int, Ack] = {}
    for ack in acks:
        verdict = ack.verdict
        if ack.key in expected and expected[ack.key].verdict is not Verdict.CONTINUE:
            verdict = expected[ack.key].verdict
        expected[ack.key] = Ack(ack.key, ack.index, verdict)
    message = waiting.message()
    if message is None:
        assert not acks
        return
    assert decode_acks(message) == list(expected.values())
    waiting.written()
    assert waiting.message() is None


def test_many_acks_take_several_messages() -> None:
    waiting = AckQueue()
    for key in range(2500):
        waiting.put(Ack(key, 0, Verdict.CONTINUE))
    keys = []
    while (message := waiting.message()) is not None:
        keys += [ack.key for ack in decode_acks(message)]
        waiting.written()
    assert keys == list(range(2500))


def test_many_forgets_take_several_messages() -> None:
    waiting = ForgetQueue()
    for key in range(2500):
        waiting.put(key)
    keys = []
    while (message := waiting.message()) is not None:
        keys += decode_keys(message)
        waiting.written()
    assert keys == list(range(2500))


def test_a_full_socket_does_not_block_and_loses_nothing() -> None:
    """What the socket does not take waits and coalesces: each stream's newest is read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        waiting = AckQueue()
        peer = Peer(ours, waiting)
        index = 0
        while True:
            waiting.put(Ack(index % 3, index, Verdict.CONTINUE))
            if not peer.flush():
                break
            index += 1
        for more in range(index + 1, index + 100):
            waiting.put(Ack(more % 3, more, Verdict.CONTINUE))
        theirs.setblocking(False)
        newest: dict[int, int] = {}
        while not peer.flush() or newest.get((index + 99) % 3) != index + 99:
            for ack in decode_acks(theirs.recv(65536)):
                newest[ack.key] = ack.index
        assert sorted(newest.values()) == [index + 97, index + 98, index + 99]


def test_a_gone_peer_is_no_error_for_the_writer() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours:
        waiting = ForgetQueue()
        waiting.put(3)
        peer = Peer(ours, waiting)
        assert peer.flush()
        assert peer.broken


class _Slow(Peer[ForgetQueue]):
    """A peer whose socket accepts nothing."""

    def flush(self) -> bool:
        return False


class _Listening(Reactor[ForgetQueue]):
    """A reactor that reports what it hears."""

    def __init__(self) -> None:
        super().__init__("listening")
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def on_message(self, peer: Peer[ForgetQueue], message: bytes) -> None:
        self.heard.put(message)

    def on_gone(self, peer: Peer[ForgetQueue]) -> None:
        self.heard.put(peer)


def test_a_peer_that_goes_while_a_write_to_it_waits_harms_no_other() -> None:
    reactor = _Listening()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    others, their_other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with their_other:
        slow = _Slow(ours, ForgetQueue())
        for peer in (slow, Peer(others, ForgetQueue())):
            reactor.register(peer)
        reactor.wake()
        theirs.close()
        assert reactor.heard.get(timeout=PATIENCE_S) is slow
        reactor.flush(slow)
        their_other.send(b"still there?")
        assert reactor.heard.get(timeout=PATIENCE_S) == b"still there?"
        reactor.stop()


class Engine:
    """An engine's end of the channel, and what it heard."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel = EngineChannel(
            on_ack=self.heard.put, on_detokenizer_gone=lambda: self.heard.put("gone")
        )


class Detokenizer:
    """A detokenizer's end of the channel, and what it heard."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.channel = DetokenizerChannel(on_forget=self.heard.put)

    def acknowledge(self, engine: Engine, ack: Ack) -> bool:
        return self.channel.acknowledge(engine.channel.path, ack)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.channel.close()


@pytest.fixture
def detokenizer() -> Iterator[Detokenizer]:
    detokenizer = Detokenizer()
    yield detokenizer
    detokenizer.channel.close()


def test_acks_and_forgets_arrive(engine: Engine, detokenizer: Detokenizer) -> None:
    ack = Ack(5, 2, Verdict.STOP)
    assert detokenizer.acknowledge(engine, ack)
    assert engine.heard.get(timeout=PATIENCE_S) == ack
    engine.channel.forget(5)
    assert detokenizer.heard.get(timeout=PATIENCE_S) == 5


def test_acks_wait_for_others_until_they_are_due(engine: Engine, detokenizer: Detokenizer) -> None:
    path, first = engine.channel.path, Ack(1, 0, Verdict.CONTINUE)
    assert detokenizer.channel.acknowledge(path, first, every_s=3600)
    assert engine.heard.get(timeout=PATIENCE_S) == first, "none was sent just before"
    for key in (2, 3):
        assert detokenizer.channel.acknowledge(path, Ack(key, 0, Verdict.CONTINUE), every_s=0.2)
    assert {engine.heard.get(timeout=PATIENCE_S).key for _ in range(2)} == {2, 3}


@pytest.mark.parametrize(
    "ending", [Ack(4, 0, Verdict.CANCELLED), Ack(4, 0, Verdict.CONTINUE, stopped=0b10)]
)
def test_an_ack_that_ends_something_waits_for_nothing(
    engine: Engine, detokenizer: Detokenizer, ending: Ack
) -> None:
    path, waiting = engine.channel.path, Ack(2, 0, Verdict.CONTINUE)
    for ack in (Ack(1, 0, Verdict.CONTINUE), waiting, ending):
        assert detokenizer.channel.acknowledge(path, ack, every_s=3600)
    assert [engine.heard.get(timeout=PATIENCE_S) for _ in range(3)][1:] == [waiting, ending]


def test_two_engines_and_two_detokenizers_need_no_configuration() -> None:
    engines = [Engine(), Engine()]
    detokenizers = [Detokenizer(), Detokenizer()]
    for number, detokenizer in enumerate(detokenizers):
        for engine in engines:
            assert detokenizer.acknowledge(engine, Ack(number, 0, Verdict.CONTINUE))
    for engine in engines:
        keys = {engine.heard.get(timeout=PATIENCE_S).key for _ in detokenizers}
        assert keys == {0, 1}
        engine.channel.close()
    for detokenizer in detokenizers:
        detokenizer.channel.close()


def test_the_socket_is_private(engine: Engine) -> None:
    folder = Path(engine.channel.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(os.fsencode(engine.channel.path)) < MAX_PATH_BYTES


def test_a_long_parent_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    channel = EngineChannel(
        directory=folder, on_ack=lambda ack: None, on_detokenizer_gone=lambda: None
    )
    assert len(os.fsencode(channel.path)) < MAX_PATH_BYTES
    channel.close()


def test_closing_removes_the_directory_and_tells_the_detokenizer(
    engine: Engine, detokenizer: Detokenizer
) -> None:
    other = Engine()
    assert detokenizer.acknowledge(other, Ack(0, 0, Verdict.CONTINUE))
    assert other.heard.get(timeout=PATIENCE_S).key == 0
    other.channel.close()
    assert not Path(other.channel.path).parent.exists()
    wait_until(lambda: detokenizer.channel.num_peers == 0)
    assert not detokenizer.acknowledge(other, Ack(0, 1, Verdict.CONTINUE))
    assert detokenizer.acknowledge(engine, Ack(0, 0, Verdict.CONTINUE))


def test_the_engine_hears_of_a_detokenizer_that_goes(engine: Engine) -> None:
    detokenizer = Detokenizer()
    assert detokenizer.acknowledge(engine, Ack(0, 0, Verdict.CONTINUE))
    assert engine.heard.get(timeout=PATIENCE_S).key == 0
    detokenizer.channel.close()
    assert engine.heard.get(timeout=PATIENCE_S) == "gone"
    engine.channel.forget(0)  # to no peer


def test_garbage_is_ignored(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(engine.channel.path)
        sock.send(b"garbage")
        sock.send(encode_acks([Ack(2, 2, Verdict.STOP)]))
        assert engine.heard.get(timeout=PATIENCE_S) == Ack(2, 2, Verdict.STOP)
    assert engine.heard.get(timeout=PATIENCE_S) == "gone"
    assert "could not handle a message" in caplog.text


def test_who_connects_waits_for_a_free_descriptor(
    engine: Engine, detokenizer: Detokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the engine's thread does not spin."""
    pauses: list[float] = []
    accept = engine.channel._listener.accept

    class Full:
        def accept(self) -> Any:
            if len(pauses) < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    listener = engine.channel._listener
    monkeypatch.setattr(channel, "time", SimpleNamespace(sleep=pauses.append))
    monkeypatch.setattr(engine.channel, "_listener", Full())
    ack = Ack(5, 2, Verdict.STOP)
    assert detokenizer.acknowledge(engine, ack)
    assert engine.heard.get(timeout=PATIENCE_S) == ack
    assert len(pauses) == 3


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_only_private_sockets_of_the_right_name_are_connected_to(
    detokenizer: Detokenizer, tmp_path: Path, mode: int
) -> None:
    """The path comes in a message, and any client may send one."""
    folder = tmp_path / "d"
    folder.mkdir()
    folder.chmod(mode)
    name = "acks" if mode == 0o755 else "other"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / name))
        listener.listen()
        ack = Ack(0, 0, Verdict.CONTINUE)
        assert not detokenizer.channel.acknowledge(str(folder / name), ack)
    for path in (str(tmp_path / "nowhere" / "acks"), "", "\0/acks", "x" * 1000):
        assert not detokenizer.channel.acknowledge(path, ack)


def test_an_engine_is_connected_to_once(engine: Engine, detokenizer: Detokenizer) -> None:
    """The path may be spelled in several ways."""
    ack = Ack(0, 0, Verdict.CONTINUE)
    assert detokenizer.acknowledge(engine, ack)
    folder, _, name = engine.channel.path.rpartition("/")
    for path in (f"{folder}/./{name}", f"/{folder}/{name}", f"{folder}/../{folder}/{name}"):
        assert not detokenizer.channel.acknowledge(path, ack)
    assert detokenizer.channel.num_peers == 1
