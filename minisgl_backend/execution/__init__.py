"""From plans to tensors, and from tensors to tokens."""
