"""Runs the engine: the loop over plans, and its face for all threads, ``Engine``."""
