"""A strict stand-in for ``triton_python_backend_utils``, which exists only inside Triton's stub.

Real classes with the methods that the package uses and no others, so that a misspelt one fails.
Response senders and metrics refuse what Triton would crash or hang on: any call after the final
flag, and calls from a thread other than the one that made the metric's family.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    """What a failed load raises."""


class TritonError:
    """An error on its way to a client."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = 1) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    """A named array; strings come back as bytes, as Triton gives them."""

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        assert isinstance(name, str) and isinstance(array, np.ndarray)
        assert array.dtype != np.dtype("O") or all(isinstance(x, bytes | str) for x in array.flat)
        assert array.dtype.kind != "U"
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._array


class InferenceResponse:
    """Output tensors, or an error."""

    def __init__(
        self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None
    ) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in output_tensors)
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceResponseSender:
    """Collects responses; ``sent`` gets (response or None, final)."""

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
        self.cancelled = False
        self.is_final = False
        self.num_sent = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert not self.is_final, "sent after the final flag"
        assert flags in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        assert response is not None or flags
        self.is_final = bool(flags)
        self.num_sent += 1
        self.sent.put((response, self.is_final))

    def is_cancelled(self) -> bool:
        assert not self.is_final, "tritonserver would crash"
        return self.cancelled


class InferenceRequest:
    """A request with its inputs; an id or parameters given as bytes need not be UTF-8."""

    def __init__(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        *,
        request_id: str | bytes = "",
        parameters: Mapping[str, Any] | bytes | None = None,
        timeout_us: int = 0,
        outputs: Sequence[str] = (),
    ) -> None:
        self._inputs = [Tensor(name, array) for name, array in inputs.items()]
        self._request_id = request_id if isinstance(request_id, bytes) else request_id.encode()
        if not isinstance(parameters, bytes):
            parameters = json.dumps(dict(parameters)).encode() if parameters else b""
        self._parameters = parameters
        self._timeout_us = timeout_us
        self._outputs = list(outputs)
        self.sender = InferenceResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id.decode()

    def parameters(self) -> str:
        return self._parameters.decode()

    def timeout(self) -> int:
        return self._timeout_us

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def get_response_sender(self) -> InferenceResponseSender:
        return self.sender


class Metric:
    """One series; only what its kind allows works."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._thread = threading.current_thread()
        self.current = 0.0

    def _check_thread(self) -> None:
        assert threading.current_thread() is self._thread, "tritonserver would die"

    def increment(self, value: float) -> None:
        self._check_thread()
        assert self._kind == "gauge" or value >= 0
        self.current += value

    def set(self, value: float) -> None:
        self._check_thread()
        assert self._kind == "gauge"
        self.current = value

    def value(self) -> float:
        return self.current


class MetricFamily:
    """Metrics with one name; ``families`` has those of the running test."""

    COUNTER = "counter"
    GAUGE = "gauge"
    families: dict[str, MetricFamily] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: str) -> None:
        assert description
        self.kind = kind
        self._thread = threading.current_thread()
        self.metrics: dict[tuple[tuple[str, str], ...], Metric] = {}
        MetricFamily.families[name] = self

    def Metric(self, labels: Mapping[str, str]) -> Metric:
        assert threading.current_thread() is self._thread, "tritonserver would die"
        assert all(isinstance(value, str) for value in labels.values())
        key = tuple(sorted(labels.items()))
        assert key not in self.metrics, "two metrics of the same labels are one in Triton"
        metric = Metric(self.kind)
        self.metrics[key] = metric
        return metric


class Logger:
    """Triton's log; ``lines`` holds what was written."""

    lines: list[str] = []  # noqa: RUF012

    @classmethod
    def log_info(cls, message: str) -> None:
        cls.lines.append(f"I {message}")

    @classmethod
    def log_warn(cls, message: str) -> None:
        cls.lines.append(f"W {message}")

    @classmethod
    def log_error(cls, message: str) -> None:
        cls.lines.append(f"E {message}")
