"""MiniSGL: an LLM engine that runs inside Triton Inference Server."""
