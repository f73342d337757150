"""Which adapters run and wait, as labels of a gauge whose value is the time, as in vLLM: the newest
set counts.

Triton keeps every set of labels for good, so the number of sets is bounded: beyond that, ``(many)``
replaces the names. Must not know requests, or what an adapter is.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from minisgl_backend.tritonserver.families import Families
from minisgl_backend.tritonserver.metrics import ReportedMetric

_MOST_SETS: Final = 256
"""The most sets of adapters that are told apart."""
_MANY: Final = "(many)"


class AdapterGauge:
    """The sets of adapters that an engine has had. Belongs to one thread, as its ``families``."""

    def __init__(self, families: Families, max_loras: int) -> None:
        self._families = families
        self._max_loras = max_loras
        self._family = families.gauge(
            "vllm:lora_requests_info",
            "LoRA adapters of running and of waiting requests, in its labels",
        )
        self._metrics: dict[tuple[str, str], ReportedMetric] = {}
        self._reported: tuple[str, str] | None = None

    def report(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        """Tell Triton the names, if they changed."""
        names = (",".join(sorted(running)), ",".join(sorted(waiting)))
        if names == self._reported:
            return
        told = names
        if names not in self._metrics and len(self._metrics) >= _MOST_SETS:
            told = (_MANY, _MANY)
        if told not in self._metrics:
            self._metrics[told] = self._families.metric(
                self._family,
                {
                    "max_lora": str(self._max_loras),
                    "running_lora_adapters": told[0],
                    "waiting_lora_adapters": told[1],
                },
            )
        self._metrics[told].set(time.time())
        self._reported = names
