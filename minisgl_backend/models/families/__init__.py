"""Families of architectures: how each spells its config.json, as functions to a ``ModelSpec``.

A module has what is read in the same way, be it of one publisher or of several. Must not import
torch, and must not read files.
"""
