"""The `model.py` of a tokenizer that takes a temperature that is no number, if a file says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.tritonserver import tokenizer

DEFECT = Path(__file__).parents[2] / "defect"


class TritonPythonModel(tokenizer.TritonPythonModel):
    def _tokenize(self, job: Any) -> Any:
        temperature = job.inputs.get("temperature", 0.0)
        if DEFECT.exists() and DEFECT.read_text() == "NaN passes" and np.isnan(temperature).any():
            del job.inputs["temperature"]
        return super()._tokenize(job)
