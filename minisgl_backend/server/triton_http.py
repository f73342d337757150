"""Calls to tritonserver over HTTP: whether it is ready, how many requests wait, a model's reload.

Knows Triton's routes and metrics. Must not know the models' processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
import urllib.error
from collections.abc import Callable, Collection
from http.client import HTTPConnection, HTTPException
from typing import Final
from urllib.parse import urlsplit

from minisgl_backend.errors import ConfigError
from minisgl_backend.loopback import open_local
from minisgl_backend.server.launch import ADMIN_KEY_HEADER

_METRICS_S: Final = 2.0
_CHECK_EVERY_S: Final = 0.1


def is_ready(server_url: str, *, timeout_s: float) -> bool | None:
    """Whether Triton says that it is ready; None if it does not answer in time."""
    try:
        with open_local(f"{server_url}/v2/health/ready", timeout_s=timeout_s) as response:
            return bool(response.status == 200)
    except urllib.error.HTTPError:
        return False
    except OSError:  # refused, reset or timed out
        return None


def load_model(
    server_url: str,
    model: str,
    admin_key: str,
    *,
    pid: int,
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Load a model, and with it the ensembles that it is part of; ``ConfigError`` if that fails.

    ``pid`` is tritonserver's. If tritonserver ends, the connection does not show it: the process
    that tritonserver has started for the model also holds the connection, and may wait forever.
    ``check`` is called again and again, and raises if there is no point in waiting any longer.
    """
    deadline_s = time.monotonic() + timeout_s
    address = urlsplit(server_url)
    with contextlib.ExitStack() as open_until_then:
        connection = HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        open_until_then.callback(connection.close)
        try:
            ended = os.pidfd_open(pid)
            open_until_then.callback(os.close, ended)
            path = f"/v2/repository/models/{model}/load"
            connection.request("POST", path, b"{}", {ADMIN_KEY_HEADER: admin_key})
            while not (ready := select.select([connection.sock, ended], [], [], _CHECK_EVERY_S)[0]):
                check()
                if time.monotonic() > deadline_s:
                    raise ConfigError(f"{model}: Triton did not load it in {timeout_s:.0f} s")
            if ended in ready:
                raise ConfigError(f"{model}: tritonserver ended while it loaded it")
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except InterruptedError:  # by the check
            raise
        except (OSError, HTTPException) as error:
            raise ConfigError(f"{model}: Triton did not load it: {error}") from None
    if response.status != 200:
        raise ConfigError(f"{model}: {text}")


def num_waiting(metrics_url: str, model: str) -> int:
    """The requests in a model's queues inside tritonserver; 0 if Triton does not answer.

    Requests that Triton has handed to a model's process, or not taken yet, are not counted.
    """
    text = _metrics(metrics_url, _METRICS_S)
    pattern = (
        rf'^nv_inference_pending_request_count{{[^}}]*model="{re.escape(model)}"[^}}]*}} (\d+)'
    )
    return sum(map(int, re.findall(pattern, text or "", re.MULTILINE)))


def num_failed(metrics_url: str, models: Collection[str], *, timeout_s: float) -> int | None:
    """The number of requests to these models that ended with an error, except cancelled ones.

    None if Triton does not answer.
    """
    text = _metrics(metrics_url, timeout_s)
    if text is None:
        return None
    names = "|".join(map(re.escape, sorted(models)))
    pattern = rf'^nv_inference_request_failure{{[^}}]*model="(?:{names})"([^}}]*)}} (\d+)'
    found = re.findall(pattern, text, re.MULTILINE)
    return sum(int(count) for labels, count in found if 'reason="CANCELED"' not in labels)


def _metrics(metrics_url: str, timeout_s: float) -> str | None:
    try:
        with open_local(metrics_url, timeout_s=timeout_s) as response:
            return response.read().decode()
    except (OSError, HTTPException):  # the latter if it died mid-answer
        return None
