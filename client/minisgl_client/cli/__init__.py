"""`minisgl generate` and `minisgl chat`: the client for people and for pipes."""
