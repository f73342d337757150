"""Inputs that once broke a property, kept as JSON; each is tried whenever the property is.

``kept`` goes above ``given`` and names the arguments to keep. Each property has its own file in
``tests/data/fuzz_corpus``, one input per line. Under the profile ``fuzz`` (``make fuzz``), an input
that fails is added to it, in the smallest form that Hypothesis finds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final

import numpy as np
from hypothesis import example

CORPUS: Final = Path(__file__).parents[1] / "data" / "fuzz_corpus"


def is_fuzzing() -> bool:
    """Whether what is found is added to the corpus."""
    return os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"


def kept(*names: str) -> Callable[[Any], Any]:
    """Try the corpus of a property first, and add to it under the profile ``fuzz``."""

    def decorate(test: Any) -> Any:
        inner = test.hypothesis.inner_test
        path = CORPUS / f"{inner.__name__}.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        for line in lines:
            test = example(**json.loads(line, object_hook=_decoded))(test)

        @wraps(inner)
        def noting(*args: Any, **given: Any) -> None:
            try:
                inner(*args, **given)
            except Exception:
                # called again and again with smaller inputs, and finally with the smallest
                if is_fuzzing():
                    found = json.dumps({name: given[name] for name in names}, default=_encoded)
                    path.write_text("\n".join([*lines, found, ""]), encoding="utf-8")
                raise

        test.hypothesis.inner_test = noting
        return test

    return decorate


def _encoded(value: Any) -> dict[str, Any]:
    """A value that JSON cannot express."""
    if isinstance(value, bytes):
        return {"!bytes": value.decode("latin-1")}
    assert isinstance(value, np.ndarray)
    return {
        "!array": "object" if value.dtype == object else str(value.dtype),
        "!of": value.tolist(),
    }


def _decoded(value: dict[str, Any]) -> Any:
    if "!bytes" in value:
        return value["!bytes"].encode("latin-1")
    if "!array" in value:
        return np.array(value["!of"], dtype=value["!array"])
    return value
