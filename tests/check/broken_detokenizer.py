"""The `model.py` of a detokenizer that ends answers twice, if a file says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl_backend.tritonserver import detokenizer
from minisgl_backend.tritonserver.responder import Responder

DEFECT = Path(__file__).parents[2] / "defect"


class DoublingResponder(Responder):
    __slots__ = ()

    def send(self, response: Any, *, final: bool = False) -> bool:
        if final and not response.has_error() and self.is_last(response):
            super().send(response)
        return super().send(response, final=final)

    @staticmethod
    def is_last(response: Any) -> bool:
        reasons = [
            it.as_numpy()[0] for it in response.output_tensors() if it.name() == "finish_reason"
        ]
        return any(reasons)


class TritonPythonModel(detokenizer.TritonPythonModel):
    def _take(self, request: Any, responder: Responder) -> None:
        if DEFECT.exists() and DEFECT.read_text() == "two ends":
            responder.__class__ = DoublingResponder
        super()._take(request, responder)
