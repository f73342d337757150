"""Replicas: several engines of one model, each in a process of its own, as one to their callers."""
