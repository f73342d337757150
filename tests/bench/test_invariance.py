"""Whether requests get the same tokens in any company, on the demo model and a CPU."""

from __future__ import annotations

from pathlib import Path

from tests.figures import figures_of


def test_requests_alone_together_cached_and_retracted(tmp_path: Path) -> None:
    """In float32 on a CPU all are equal; the second engine has too few pages for all requests."""
    command = ["invariance", "--device", "cpu", "--dtype", "float32", "--num-pages", "512"]
    command += ["--requests", "5", "--input-length", "16", "40", "--output-length", "20", "40"]
    figures = figures_of(command, tmp_path)
    assert figures["requests"] == 5
    assert [figures[name] for name in ("together", "warm", "retracted", "in_all")] == [5, 5, 5, 5]
    assert figures["retractions"] > 0
