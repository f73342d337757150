"""The servers that are measured."""

from tests.server.test_perf_analyzer import perf_analyzer

__all__ = ["perf_analyzer"]  # the fixture, for this folder
