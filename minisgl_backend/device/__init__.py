"""Where tensors live and work is queued."""
