"""What the operator of a gateway decides."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl_gateway.dialects.base import DialectName


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """``model`` is the ensemble in Triton, ``model_name`` what callers call it. Limits are those of
    one gateway; a request counts once for each of its answers. With ``servers``, requests are
    spread over these gRPC addresses, and ``triton`` is not used. ``admin_keys`` are API keys, too,
    and only they may load and unload LoRA adapters.

    With ``shorten_max_tokens`` a ``max_tokens`` for which the context has no room is lowered
    instead of refused. ``cors_origins`` are the origins whose web pages may send requests and read
    the answers, "*" for all.

    ``tool_dialect`` is how the model calls tools; None means as its chat template shows.

    The gateway keeps at most ``max_stored_responses`` from which later requests may go on, with at
    most ``max_stored_bytes`` in total.

    ``timeout_s`` bounds a request as a whole, including the time in which its body arrives;
    ``patience_s`` bounds each silence of a client that must send its request or take its answer;
    ``drain_timeout_s`` is how long the gateway, when it ends, waits for answers.
    """

    triton: str = "localhost:8001"
    servers: tuple[str, ...] = ()
    model: str = "minisgl"
    model_name: str = "minisgl"
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    default_max_tokens: int = 1024
    shorten_max_tokens: bool = False
    tool_dialect: DialectName | None = None
    max_requests: int = 256
    max_requests_per_key: int = 64
    max_body_bytes: int = 4 * 2**20
    max_header_bytes: int = 16 * 2**10
    max_stored_responses: int = 1024
    max_stored_bytes: int = 64 * 2**20
    timeout_s: float = 300.0
    patience_s: float = 30.0
    drain_timeout_s: int = 30
