"""A server whose /dev/shm is small, and full.

Knows mount namespaces: the server gets a /dev/shm of its own, if this machine allows that, since
other programs use the shared one.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

from minisgl_client.client import Client
from minisgl_client.errors import MinisglError

from minisgl_check.case import Case
from minisgl_check.fault import Fault, Settings
from minisgl_check.served import served
from minisgl_check.target import Target
from minisgl_check.waiting import wait_until

_SIZE_MB: Final = 64
_MOUNT: Final = f'mount -t tmpfs -o size={_SIZE_MB}m tmpfs /dev/shm && exec "$@"'
_OWN_SHM: Final = ("unshare", "--mount", "sh", "-c", _MOUNT, "sh")
_LETTERS: Final = 2_000_000
_NUM_TRIES: Final = 8


def full(settings: Settings, case: Case) -> None:
    """Large requests while /dev/shm is full, and again once there is room."""
    if not _may_mount():
        case.is_skipped = True
        case.what = "this machine allows no mount of one's own"
        return
    with served(before=_OWN_SHM, tritonserver=settings.tritonserver) as server:
        target = server.target(settings.patience_s)
        if target is None:
            case.expect(False, "the server was not ready in time")
            return
        # /dev/shm as the server's mount namespace sees it
        place = Path(f"/proc/{target.stats().processes['tritonserver']['pid']}/root/dev/shm")
        filler = place / "filler"
        with filler.open("wb") as file:
            while shutil.disk_usage(place).free:
                file.write(bytes(min(2**20, shutil.disk_usage(place).free)))
                file.flush()
        ended = _ask(target, case)
        filler = Path(f"/proc/{server.process.pid}/root/dev/shm/filler")
        filler.unlink(missing_ok=True)
        back = wait_until(target.serves, settings.patience_s)
        case.expect(back, "it does not serve once there is room")
        recoveries = target.stats().told["num_recoveries"]
        case.what = f"{dict(ended)} meanwhile, {recoveries} recoveries; then it serves"


FAULTS: Final = (Fault("F19", "/dev/shm is full", full),)


def _may_mount() -> bool:
    command = [*_OWN_SHM, "true"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _ask(target: Target, case: Case) -> Counter[str]:
    """Prompts of several megabytes, and small ones; each must end."""
    ended: Counter[str] = Counter()
    for number in range(_NUM_TRIES):
        prompt = "a" * (_LETTERS if number % 2 else 10)
        with Client(target.grpc_address, retries=0, timeout_s=30) as client:
            try:
                client.generate(prompt, max_tokens=2)
                ended["answered"] += 1
            except MinisglError as error:
                ended["refused"] += 1
                text = str(error)
                case.expect("shm_region" not in text, f"tells of the inside: {text[:200]}")
                case.expect("/dev/" not in text, f"tells of the inside: {text[:200]}")
    case.count = _NUM_TRIES
    case.ended += ended
    return ended
