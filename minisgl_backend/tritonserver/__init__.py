"""The Triton edge: adapters of three models, the channel between two of them, the wire format."""
