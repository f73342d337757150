"""Which pages hold which tokens, and who may use them. Pure: page ids, no tensors."""
