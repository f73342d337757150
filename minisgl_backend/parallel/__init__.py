"""Ranks: how the parts of one engine that sit on several devices talk to each other."""
