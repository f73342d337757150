"""Triton's requests and tensors."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl_backend.errors import InvalidRequest
from minisgl_backend.limits import Limits
from minisgl_backend.tritonserver.tensors import checked_size
from tests.fakes.pb_utils import InferenceRequest


def test_sizes_are_bytes() -> None:
    arrays = {"a": np.array(["é".encode()], np.object_), "b": np.zeros(3, np.int32)}
    request = InferenceRequest(arrays, parameters='{"a": "éé"}'.encode())
    assert checked_size(request, arrays, Limits()) == 2 + 12 + 13
    assert checked_size(request, arrays, Limits(prompt_bytes=17, other_bytes=10)) == 27
    with pytest.raises(InvalidRequest, match="must be at most 26 bytes, got 27"):
        checked_size(request, arrays, Limits(prompt_bytes=16, other_bytes=10))
