"""Benchmarks: each module measures one thing and is one command of ``minisgl bench``."""

import minisgl_kit as minisgl_kit  # what it sets must come before gRPC
