"""Scripts that make what the repository ships: the demo model, the reference, GPU bundles."""
