"""Decides what each step does: order, admission, chunks, retraction. Pure Python and numpy."""
