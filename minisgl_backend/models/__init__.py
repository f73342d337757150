"""Decoder models: what a checkpoint says, how it is computed, how its weights come in."""
