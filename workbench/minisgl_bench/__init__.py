"""Benchmarks: each module measures one thing and is one command of ``minisgl bench``."""
