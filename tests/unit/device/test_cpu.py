"""The CPU as a device: one queue, in order, in inference mode."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from minisgl_backend.device.cpu import CpuDevice
from minisgl_backend.errors import InvariantError


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(num_threads=1)
    yield device
    device.close()


def test_work_runs_in_order_and_submitting_does_not_wait(device: CpuDevice) -> None:
    gate, seen = threading.Event(), list[int]()
    first = device.submit(lambda: gate.wait(60))
    rest = [device.submit(partial(seen.append, number)) for number in range(20)]
    assert seen == []  # all wait behind the first one
    gate.set()
    assert first.result()
    for submission in rest:
        submission.result()
    assert seen == list(range(20))


def test_work_is_in_inference_mode_on_a_thread_of_its_own(device: CpuDevice) -> None:
    assert device.submit(torch.is_inference_mode_enabled).result()
    assert device.submit(threading.get_ident).result() != threading.get_ident()


def test_what_work_raises_comes_with_its_result(device: CpuDevice) -> None:
    failing = device.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert device.submit(lambda: 7).result() == 7


def test_copies_share_memory(device: CpuDevice) -> None:
    array = np.arange(5)
    tensor = device.download(device.upload(array))
    assert tensor.tolist() == [0, 1, 2, 3, 4]
    assert tensor.data_ptr() == array.ctypes.data


def test_closing_twice_is_closing(device: CpuDevice) -> None:
    device.close()
    device.close()


def test_a_closed_device_takes_no_work(device: CpuDevice) -> None:
    device.close()
    with pytest.raises(InvariantError, match="the device is closed"):
        device.submit(lambda: 7)


def test_the_worker_of_a_device_that_is_dropped_ends() -> None:
    device = CpuDevice()
    worker = device.submit(threading.current_thread).result()
    del device
    worker.join(60)
    assert not worker.is_alive()


def test_the_process_ends_while_work_runs() -> None:
    code = (
        "import time; from minisgl_backend.device.cpu import CpuDevice;"
        "CpuDevice().submit(lambda: time.sleep(600)); time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_free_memory_is_counted(device: CpuDevice) -> None:
    assert 2**20 < device.free_memory() < 2**50
