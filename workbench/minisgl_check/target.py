"""The server that is checked: its addresses, and its counts.

Knows addresses, the health port and the client. Must not know cases.
"""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_backend.loopback import open_local

_ANSWER_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Target:
    """``grpc_address`` is HOST:PORT, the other two are http:// addresses without a path."""

    grpc_address: str
    http_url: str
    health_url: str

    def stats(self) -> Stats:
        """Counts of all processes at this moment; raises ``OSError`` if there is no answer."""
        with open_local(f"{self.health_url}/stats", timeout_s=_ANSWER_S) as response:
            return Stats(json.load(response))

    def is_ready(self) -> bool:
        """Whether the health port says that requests are served; raises ``OSError`` if there is no
        answer."""
        try:
            with open_local(f"{self.health_url}/ready", timeout_s=_ANSWER_S) as response:
                return response.status == 200
        except urllib.error.HTTPError:
            return False

    def serves(self) -> bool:
        """Whether a new request is answered."""
        if not self.is_ready():
            return False
        with Client(self.grpc_address, retries=0, timeout_s=10) as client:
            try:
                return bool(client.generate(input_ids=[1], max_tokens=1).num_output_tokens)
            except MinisglError:
                return False


@dataclass(frozen=True, slots=True)
class Stats:
    """An answer of ``/stats``."""

    told: Mapping[str, Any]

    def process(self, model: str) -> Mapping[str, Any]:
        """The counts of a model's process; empty if it has none that answers."""
        found = [one for one in self.told["models"] if one["model"] == model]
        return found[0] if len(found) == 1 and "error" not in found[0] else {}

    @property
    def processes(self) -> Mapping[str, Mapping[str, Any]]:
        """The footprint of each process by name."""
        models = {one["model"]: one for one in self.told["models"]}
        return {"tritonserver": self.told["tritonserver"], **models}

    @property
    def engine(self) -> Mapping[str, Any]:
        """The counts of the engine; empty if it does not answer."""
        return self.process("llm_engine")

    @property
    def info(self) -> Mapping[str, Any]:
        """The engine's ``EngineInfo``."""
        told: Mapping[str, Any] = self.engine["info"]
        return told

    @property
    def num_positions(self) -> int:
        """Token positions that all pages together have."""
        return int(self.info["num_pages"]) * int(self.info["page_size"])

    @property
    def resident_mb(self) -> float:
        """Memory of all processes."""
        return float(sum(one.get("resident_bytes", 0) for one in self.processes.values())) / 1e6
