"""Benchmarks of a running server, and their parts."""
