"""Plans become tensors, tensors become tokens."""
