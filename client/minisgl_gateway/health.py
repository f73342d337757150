"""``/health``: whether the engine takes requests.

Knows the engine through ``Engine`` only. Must not know what requests ask for.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Final

from minisgl_client.errors import MinisglError

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.errors import unavailable
from minisgl_gateway.servers import Engine

_HEALTH_S: Final = 5.0
_PROBED_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Probe:
    """Whether the engine took requests, and how long this answer is valid."""

    is_ready: bool
    until_s: float


class HealthRoute:
    """Asks one engine, or several servers."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._probing = asyncio.Lock()
        self._probe = _Probe(is_ready=False, until_s=0.0)

    async def health(self) -> schema.Health:
        """GET /health; raises ``ApiError`` 503 if the engine takes no requests.

        A request to cancel an unknown id goes all the way through it, costs nothing, and is
        taken by a full queue too, which is no reason to take the gateway out of service. One such
        probe serves all who ask within a second, since it needs no key.
        """
        async with self._probing:
            if time.monotonic() >= self._probe.until_s:
                is_ready = await self._is_ready()
                self._probe = _Probe(is_ready, time.monotonic() + _PROBED_S)
        if not self._probe.is_ready:
            raise unavailable("the engine is not ready")
        return schema.Health()

    async def _is_ready(self) -> bool:
        try:
            await asyncio.wait_for(self._engine.cancel(f"health-{uuid.uuid4().hex}"), _HEALTH_S)
        except (MinisglError, asyncio.TimeoutError):
            return False
        return True
