"""Faults, bad input and load against a server: `minisgl check`."""

import minisgl_kit as minisgl_kit  # what it sets must come before gRPC
