"""Tests against a real tritonserver."""
