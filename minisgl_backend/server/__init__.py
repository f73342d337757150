"""Finds, starts and stops a real tritonserver that serves the model repository."""
