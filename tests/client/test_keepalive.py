"""How often a client asks whether its connection still works."""

from __future__ import annotations

from minisgl_client.transport.grpc import _OPTIONS


def test_pings_are_as_rare_as_triton_wants_them() -> None:
    """By default it cuts a connection on which they come more often while it has nothing to send:
    whole answers that took five minutes were lost."""
    assert dict(_OPTIONS)["grpc.keepalive_time_ms"] > 300_000
