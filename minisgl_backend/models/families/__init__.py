"""Families of architectures: functions from each one's spelling of config.json to a ``ModelSpec``.

A module has what is read in the same way, be it from one publisher or several. Must not import
torch, and must not read files.
"""
