"""Several engines, each in a process of its own, behind one door."""
