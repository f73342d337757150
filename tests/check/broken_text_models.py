"""The text models, which break the current promise (`promises`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from minisgl_backend.tritonserver import detokenizer, tokenizer
from minisgl_backend.tritonserver.setup import runtime_directory
from minisgl_check.defect import Switch
from minisgl_kit.triton_wrappers import TritonWrapper
from tests.check.promises import Broken


def is_broken(promise: Broken) -> bool:
    directory = runtime_directory()
    assert directory is not None
    return Switch(directory).is_on(promise)


class Tokenizer(tokenizer.TritonPythonModel):
    """Accepts a temperature that is not a number."""

    def execute(self, requests: list[Any]) -> None:
        if is_broken(Broken.NAN):
            requests = [_WithoutNaN(request) for request in requests]
        super().execute(requests)


class _WithoutNaN(TritonWrapper):
    def inputs(self) -> list[Any]:
        return [
            tensor
            for tensor in self.wrapped.inputs()
            if tensor.name() != "temperature" or not np.isnan(tensor.as_numpy()).any()
        ]


class Detokenizer(detokenizer.TritonPythonModel):
    """Ends answers twice."""

    def execute(self, requests: list[Any]) -> None:
        if is_broken(Broken.TWO_ENDS):
            requests = [_EndingTwice(request) for request in requests]
        super().execute(requests)


class _EndingTwice(TritonWrapper):
    def get_response_sender(self) -> _Doubling:
        return _Doubling(self.wrapped.get_response_sender())


class _Doubling(TritonWrapper):
    def send(self, *responses: Any, **flags: Any) -> None:
        if any(is_last(response) for response in responses):
            self.wrapped.send(*responses)
        self.wrapped.send(*responses, **flags)


def is_last(response: Any) -> bool:
    """Whether a response says why its answer has ended."""
    if response.has_error():
        return False
    return any(
        tensor.as_numpy()[0]
        for tensor in response.output_tensors()
        if tensor.name() == "finish_reason"
    )
