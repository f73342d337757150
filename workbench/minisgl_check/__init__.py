"""Faults, bad input and load against a server: `minisgl check`."""
