"""Attention over paged keys and values."""
