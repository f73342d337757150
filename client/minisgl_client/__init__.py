"""Python client of a MiniSGL server; talks to Triton over the network only."""
