"""Ranks: how the parts of one engine on several devices talk to each other."""
