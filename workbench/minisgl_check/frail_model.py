"""The model `llm_engine` that breaks as a file tells it.

Knows the engine that breaks (``frail``) and how the model puts one together. Runs in the model's
process only, where Triton's module is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final
from unittest import mock

from minisgl_backend import build, build_rank
from minisgl_backend.config import EngineOptions
from minisgl_backend.execution import cpu_executor
from minisgl_backend.runtime import engine
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.tritonserver.dispatch import Dispatcher
from minisgl_backend.tritonserver.responder import Responder
from minisgl_backend.tritonserver.response_stream import ResponseStream
from minisgl_check.frail import (
    FrailCache,
    FrailExecutor,
    FrailLoop,
    FrailSampler,
    FrailScheduler,
    pause,
)

_FOLLOWER_COMMAND: Final = (sys.executable, "-m", "minisgl_check.frail_rank")


class FrailDispatcher(Dispatcher):
    """Sends late."""

    def _send(self, stream: ResponseStream) -> None:
        pause()
        super()._send(stream)


class FrailModel(llm_engine.TritonPythonModel):
    """The model `llm_engine`, put together from the classes of ``frail``."""

    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        with (
            mock.patch.multiple(
                build,
                RadixCache=FrailCache,
                Scheduler=FrailScheduler,
                _FOLLOWER_COMMAND=_FOLLOWER_COMMAND,
            ),
            mock.patch.object(build_rank, "CpuExecutor", FrailExecutor),
            mock.patch.object(cpu_executor, "Sampler", FrailSampler),
            mock.patch.object(engine, "Loop", FrailLoop),
        ):
            return build.build_engine(options)

    def initialize(self, args: Mapping[str, str]) -> None:
        with mock.patch.object(llm_engine, "Dispatcher", FrailDispatcher):
            super().initialize(args)

    def _accept(self, request: Any, responder: Responder) -> None:
        pause()
        super()._accept(request, responder)
