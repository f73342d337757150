"""Triton's module for Python models exists inside its stub only; tests get a strict fake."""

from __future__ import annotations

import sys

from tests.fakes import pb_utils

sys.modules["triton_python_backend_utils"] = pb_utils
