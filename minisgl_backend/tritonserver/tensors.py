"""Triton's requests and tensors <-> numpy arrays.

Must not know what any value means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.limits import Limits

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]


def read_inputs(request: Any) -> dict[str, npt.NDArray[Any]]:
    """The input tensors of a request by name; strings are bytes in arrays of objects."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def read_parameters(request: Any) -> dict[str, Any]:
    """The request parameters by name; raises ``InvalidRequest``, also for a bad request id.

    Triton's HTTP frontend passes on whatever bytes a client sends.
    """
    try:
        request.request_id()
    except UnicodeDecodeError:
        raise InvalidRequest("the request id must be valid UTF-8") from None
    text = _parameters_text(request)
    parameters: dict[str, Any] = json.loads(text) if text else {}
    return parameters


def _parameters_text(request: Any) -> str:
    try:
        return request.parameters() or ""
    except UnicodeDecodeError:
        raise InvalidRequest("request parameters must be valid UTF-8") from None


def checked_size(request: Any, arrays: Arrays, limits: Limits) -> int:
    """Number of bytes of a request's tensors and parameters. Raises ``InvalidRequest`` if there are
    too many."""
    size = len(_parameters_text(request).encode()) + sum(
        sum(map(len, array.flat)) if array.dtype == object else array.nbytes
        for array in arrays.values()
    )
    most = limits.prompt_bytes + limits.other_bytes
    if size > most:
        ids = arrays.get("input_ids")
        if ids is not None and ids.nbytes > limits.prompt_bytes:
            raise InvalidRequest(
                f"prompt of {ids.size} tokens is too long: a request must be at most {most} bytes"
            )
        raise InvalidRequest(f"a request must be at most {most} bytes, got {size}")
    return size


def make_response(outputs: Arrays) -> Any:
    """A response of these output tensors."""
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, array) for name, array in outputs.items()]
    )
