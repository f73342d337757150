"""The process of a rank that breaks as a file tells it: ``cli.rank`` with a class of ``frail``."""

from __future__ import annotations

import logging
import os
import sys
from unittest import mock

from minisgl_backend import build_rank
from minisgl_backend.cli import rank
from minisgl_check.frail import FrailFollower

if __name__ == "__main__":
    with mock.patch.object(build_rank, "CpuExecutor", FrailFollower):
        code = rank.main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # as ``cli.rank`` ends
