"""Runs the engine: the loop over plans, and the thread-safe face that adapters call."""
