"""Benchmarks of a running server, and what they are made of."""
