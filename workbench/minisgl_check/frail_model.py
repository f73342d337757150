"""The model `llm_engine` with an engine that breaks when it is told to.

Knows the parts of that engine (``frail``) and Triton's requests. Runs in the model's process only,
which has Triton's module.
"""

from __future__ import annotations

from typing import Any

from minisgl_backend.build import build_engine
from minisgl_backend.config import EngineOptions
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.tritonserver.setup import runtime_directory
from minisgl_check.defect import Defect, Switch
from minisgl_check.frail import Frailty
from minisgl_kit.triton_wrappers import TritonWrapper


def own_frailty(*, raises_once: Defect = Defect.ONE_FORWARD) -> Frailty:
    """The frailty of this process; its switch is in the private directory of its server."""
    directory = runtime_directory()
    assert directory is not None, "only a server of the check's own has such a model"
    return Frailty(Switch(directory), raises_once=raises_once)


class TritonPythonModel(llm_engine.TritonPythonModel):
    """What Triton loads in place of the shipped model."""

    @staticmethod
    def make_engine(options: EngineOptions) -> EngineBase:
        return build_engine(options, own_frailty().parts())

    def execute(self, requests: list[Any]) -> None:
        frailty = own_frailty()
        super().execute([_Request(request, frailty) for request in requests])


class _Request(TritonWrapper):
    """One of Triton's requests, whose responses are sent late."""

    def __init__(self, request: Any, frailty: Frailty) -> None:
        super().__init__(request)
        self._frailty = frailty

    def get_response_sender(self) -> _Sender:
        return _Sender(self.wrapped.get_response_sender(), self._frailty)


class _Sender(TritonWrapper):
    """One of Triton's response senders, which is slow."""

    def __init__(self, sender: Any, frailty: Frailty) -> None:
        super().__init__(sender)
        self._frailty = frailty

    def send(self, *response: Any, **flags: Any) -> None:
        self._frailty.pause()
        self.wrapped.send(*response, **flags)
