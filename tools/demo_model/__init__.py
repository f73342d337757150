"""The demo model: its training text, its training and its score."""
