"""The `minisgl` command."""
