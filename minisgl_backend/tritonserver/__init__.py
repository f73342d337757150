"""The Triton edge: adapters of the three models, the channel between two of them, the wire format."""
