"""Mixture-of-experts feed-forward blocks."""
