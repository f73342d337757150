"""How much the properties are tried: ``HYPOTHESIS_PROFILE=nightly`` multiplies every test by 50.

The default run is the same each time; the nightly one draws anew and prints what reproduces a
failure. ``make fuzz`` runs under ``fuzz`` again and again, and keeps what failed in
``tests/data/fuzz_corpus``, where it is tried first the next time.
"""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

_CORPUS = Path(__file__).parents[1] / "data" / "fuzz_corpus"

settings.register_profile(
    "default",
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly",
    max_examples=5000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    database=DirectoryBasedExampleDatabase(_CORPUS),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
