"""Decoder models: what a checkpoint says, how a model is computed, how weights are loaded."""
