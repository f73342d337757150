"""A small client for a server under test: HTTP as curl, gRPC as tritonclient, and metrics."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

from minisgl_backend.server.launch import ADMIN_KEY_HEADER
from minisgl_backend.server.process import TritonServer
from minisgl_backend.server.progress import STUCK_AFTER_S

PATIENCE_S = STUCK_AFTER_S + 60.0
"""How long a test waits for what normally comes at once. It allows for a machine that stalls for a
while, and for a start of tritonserver that hangs and is begun again."""

_DTYPES = {
    "text_input": "BYTES",
    "messages": "BYTES",
    "tools": "BYTES",
    "sampling_parameters": "BYTES",
    "stop": "BYTES",
    "stop_words": "BYTES",
    "logit_bias": "BYTES",
    "cache_salt": "BYTES",
    "structured_outputs": "BYTES",
    "temperature": "FP32",
    "top_p": "FP32",
    "seed": "UINT64",
    "random_seed": "UINT64",
}
_NUMPY = {"BYTES": np.object_, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message, status)
        self.message = message
        self.status = status


def chat(content: str) -> str:
    """The ``messages`` of one question."""
    return json.dumps([{"role": "user", "content": content}])


def generate(server: TritonServer, model: str = "minisgl", /, **values: Any) -> dict[str, Any]:
    """One answer over HTTP; raises ``Refused``."""
    body = json.dumps(values).encode()
    request = urllib.request.Request(server.url(f"/v2/models/{model}/generate"), data=body)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S * 2) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise Refused(json.load(error)["error"], error.code) from None


def generate_stream(
    server: TritonServer, model: str = "minisgl", /, **values: Any
) -> list[dict[str, Any]]:
    """All server-sent events of an answer."""
    with open_stream(server, model, **values) as events:
        return list(events)


@contextmanager
def open_stream(
    server: TritonServer, model: str = "minisgl", /, **values: Any
) -> Iterator[Iterator[dict[str, Any]]]:
    """An answer as server-sent events; leaving the block disconnects."""
    body = json.dumps(values).encode()
    request = urllib.request.Request(
        server.url(f"/v2/models/{model}/generate_stream"),
        data=body,
        headers={"Accept": "text/event-stream"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S * 2) as response:
        lines = (line.decode().rstrip("\n") for line in response)
        yield (json.loads(line[len("data: ") :]) for line in lines if line.startswith("data: "))


def post(server: TritonServer, path: str, **values: Any) -> None:
    """POST to the server with its operator's rights; raises ``Refused``."""
    request = urllib.request.Request(
        server.url(path),
        data=json.dumps(values).encode(),
        headers={ADMIN_KEY_HEADER: server.admin_key},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S * 2):
            pass
    except urllib.error.HTTPError as error:
        raise Refused(error.read().decode(), error.code) from None


def tensors(values: dict[str, Any], *, batched: bool = False) -> list[grpcclient.InferInput]:
    """Input tensors for these values, with or without the batch dimension of `minisgl_batched`."""
    inputs = []
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        datatype = "BOOL" if isinstance(items[0], bool) else _DTYPES.get(name, "INT32")
        if datatype == "BYTES":
            items = [item.encode() for item in items]
        array = np.array(items, dtype=_NUMPY.get(datatype, np.int32))
        if batched:
            array = array[None]
        tensor = grpcclient.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


class Call:
    """One gRPC stream with one request."""

    def __init__(
        self,
        server: TritonServer,
        model: str = "minisgl",
        *,
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        inputs: list[grpcclient.InferInput] | None = None,
        outputs: list[grpcclient.InferRequestedOutput] | None = None,
        **values: Any,
    ) -> None:
        """``inputs`` are tensors in addition to the values; ``outputs`` None stands for all."""
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False
        self.client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self.client.start_stream(lambda result, error: self._results.put(error or result))
        self.client.async_stream_infer(
            model,
            [*tensors(values, batched=model.endswith("_batched")), *(inputs or [])],
            outputs=outputs,
            request_id=request_id,
            parameters=parameters,
            enable_empty_final_response=True,
        )

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        # 24.10 leaks a request whose stream is cancelled after its end
        if not self._ended:
            self.cancel()
        else:
            self.client.stop_stream()
            self.client.close()

    def next(self, timeout_s: float = PATIENCE_S) -> dict[str, Any] | None:
        """The next response; None after the last one. Raises ``Refused``."""
        if self._ended:
            return None
        result = self._results.get(timeout=timeout_s)
        if isinstance(result, Exception):
            self._ended = True
            raise Refused(str(result))
        response = result.get_response()
        # the final flag comes alone, or with the last response
        self._ended = response.parameters["triton_final_response"].bool_param
        if self._ended and not response.outputs:
            return None
        return {output.name: result.as_numpy(output.name) for output in response.outputs}

    def all(self) -> list[dict[str, Any]]:
        """All responses still to come."""
        return list(iter(self.next, None))

    def cancel(self) -> None:
        """Cancel the stream, and close the connection."""
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


def text_of(responses: list[dict[str, Any]]) -> str:
    """The text of gRPC responses."""
    return b"".join(response["text_output"].item() for response in responses).decode()


class Metrics:
    """One reading of the server's metrics."""

    def __init__(self, server: TritonServer) -> None:
        url = f"http://127.0.0.1:{server.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
            self.text: str = response.read().decode()

    def __getitem__(self, name: str) -> float:
        """The sum of a metric over all label sets."""
        values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", self.text, re.M)
        if not values:
            raise KeyError(name)
        return sum(map(float, values))

    def labelled(self, name: str, label: str, value: str) -> float:
        """The metric's value in the series whose label has that value."""
        pattern = rf'^{re.escape(name)}\{{[^}}]*{label}="{re.escape(value)}"[^}}]*\}} (\S+)$'
        return sum(map(float, re.findall(pattern, self.text, re.M)))


def wait_returned(server: TritonServer, model: str, num_requests: int) -> None:
    """Wait until a model has taken in ``num_requests`` since its load, and the server knows that.

    A model that is paused before that counts as dead after a second, even if the request has had
    its first response.
    """

    def have_returned() -> bool:
        with urllib.request.urlopen(
            server.url(f"/v2/models/{model}/stats"), timeout=PATIENCE_S
        ) as response:
            (stats,) = json.load(response)["model_stats"]
        return bool(stats["execution_count"] == num_requests)

    wait_for(have_returned, f"the end of {num_requests} calls of {model}")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Poll until the condition holds; fail the test if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.01)
