"""The handshake of nodes: both sides prove that they know the secret of the group.

Each proves it by an HMAC-SHA256 over the other side's challenge and the fields of the messages.
Nothing else is read from a connection before that.

    node k                                  rank 0
                                            challenge
    hello: its challenge, place and proof
                                            welcome: the size of the group, and proof; or a refusal

Knows one connection and the secret. Must not know which ranks are there already: the caller judges.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from minisgl_backend.errors import ConfigError

logger = logging.getLogger(__name__)

SILENCE_S: Final = 10.0
"""A node that is silent for longer is lost, even if the timeout of the ranks is longer."""
HANDSHAKE_S: Final = 5.0
"""The time that a handshake may take."""

_MAGIC: Final = b"minisgl1"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_CHALLENGE: Final = struct.Struct(f"<8s{_NONCE_BYTES}s")
_PLACE: Final = struct.Struct("<III")  # number of nodes, node, number of the rank on its node
_SIZES: Final = struct.Struct("<III")  # number of ranks, of those on each node, port of the store
_STRANGE: Final = "what listens there is not node 0 of this release"


class Reply(IntEnum):
    """How rank 0 answers a hello."""

    WELCOME = 0
    WRONG_SECRET = 1
    WRONG_PLACE = 2
    TAKEN = 3


@dataclass(frozen=True, slots=True)
class NodePlace:
    """What a rank of another node says about itself. ``index`` is its number on its node."""

    num_nodes: int
    node: int
    index: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """What rank 0 tells it: the number of ranks in total and per node, and the store's port."""

    size: int
    local_size: int
    store_port: int


class NotYet(Exception):
    """Rank 0 does not take this rank now, but may do so later."""


def knock(connection: socket.socket, secret: bytes, place: NodePlace) -> Welcome:
    """The handshake of a node other than 0, on a fresh connection to rank 0.

    Raises ``ConfigError`` if the two do not belong together, ``NotYet`` if rank 0 does not take
    the rank now, ``OSError`` if the connection breaks.
    """
    deadline_s = time.monotonic() + HANDSHAKE_S
    magic, theirs = _CHALLENGE.unpack(_exactly(connection, _CHALLENGE.size, deadline_s))
    if magic != _MAGIC:
        raise ConfigError(_STRANGE)
    ours, fields = secrets.token_bytes(_NONCE_BYTES), _PLACE.pack(*_numbers(place))
    proof = _proof(secret, b"follower", theirs, ours, fields)
    connection.sendall(_MAGIC + ours + fields + proof)
    (number,) = _exactly(connection, 1, deadline_s)
    if number not in set(Reply):
        raise ConfigError(_STRANGE)
    reply = Reply(number)
    if reply is Reply.WRONG_SECRET:
        raise ConfigError("node 0 has another secret")
    if reply is Reply.WRONG_PLACE:
        raise ConfigError(
            f"node 0 has no place for node {place.node} of {place.num_nodes}: nnodes must be the "
            "same on all nodes, and node_rank a number below it"
        )
    if reply is Reply.TAKEN:
        raise NotYet(f"node 0 has a node {place.node} already")
    sizes = _exactly(connection, _SIZES.size, deadline_s)
    proof = _exactly(connection, _PROOF_BYTES, deadline_s)
    if not hmac.compare_digest(proof, _proof(secret, b"leader", ours, theirs, sizes)):
        raise ConfigError("what listens there does not know the secret")
    prepare(connection)
    return Welcome(*_SIZES.unpack(sizes))


def answer(
    connection: socket.socket, secret: bytes, judge: Callable[[NodePlace], Reply | Welcome]
) -> NodePlace | None:
    """Rank 0's side. Returns the place of the rank, None if it is refused. Raises ``OSError``."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    ours = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_CHALLENGE.pack(_MAGIC, ours))
    hello = _exactly(connection, _CHALLENGE.size + _PLACE.size + _PROOF_BYTES, deadline_s)
    magic, theirs = _CHALLENGE.unpack(hello[: _CHALLENGE.size])
    fields = hello[_CHALLENGE.size : -_PROOF_BYTES]
    proof = _proof(secret, b"follower", ours, theirs, fields)
    if magic != _MAGIC or not hmac.compare_digest(hello[-_PROOF_BYTES:], proof):
        connection.sendall(bytes([Reply.WRONG_SECRET]))
        logger.warning("a caller that does not know the secret was refused")
        return None
    place = NodePlace(*_PLACE.unpack(fields))
    reply = judge(place)
    if not isinstance(reply, Welcome):
        connection.sendall(bytes([reply]))
        logger.warning("node %d of %d was refused: %s", place.node, place.num_nodes, reply.name)
        return None
    sizes = _SIZES.pack(reply.size, reply.local_size, reply.store_port)
    proof = _proof(secret, b"leader", theirs, ours, sizes)
    connection.sendall(bytes([Reply.WELCOME]) + sizes + proof)
    return place


def _numbers(place: NodePlace) -> tuple[int, int, int]:
    return place.num_nodes, place.node, place.index


def _proof(secret: bytes, role: bytes, theirs: bytes, ours: bytes, fields: bytes) -> bytes:
    """Proves knowledge of the secret to the side whose challenge is ``theirs``, and signs the
    ``fields`` of the message. No other role gives the same proof."""
    return hmac.digest(secret, b"%b:%b%b%b" % (role, theirs, ours, fields), "sha256")


def _exactly(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """The next bytes of a connection. Raises ``OSError`` if they have not come by the deadline."""
    found = bytearray()
    while len(found) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left_s)
        piece = connection.recv(num_bytes - len(found))
        if not piece:
            raise ConnectionResetError("the connection was closed in the handshake")
        found += piece
    return bytes(found)


def prepare(connection: socket.socket) -> None:
    """Make a connection send at once, and break when the other side does not acknowledge."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = int(SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)
