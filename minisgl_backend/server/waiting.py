"""How many requests wait inside tritonserver for a model.

Knows the one metric of Triton's that says it. What Triton has handed to a model's process, or not
taken yet, is not among them.
"""

from __future__ import annotations

import re

from minisgl_backend.loopback import open_local

_ASK_S = 2.0


def num_waiting(metrics_url: str, model: str) -> int:
    """The requests in a model's queues; 0 where nobody tells."""
    try:
        with open_local(metrics_url, timeout_s=_ASK_S) as response:
            text = response.read().decode()
    except OSError:
        return 0
    pattern = (
        rf'^nv_inference_pending_request_count{{[^}}]*model="{re.escape(model)}"[^}}]*}} (\d+)'
    )
    return sum(map(int, re.findall(pattern, text, re.MULTILINE)))
