"""Quantization tools: functions from each one's ``quantization_config`` to rules about projections.

A module has what one tool writes, or several tools that write alike. What cannot be computed is
refused by name: a format that is misread would give wrong text without an error. Must not know
files or tensors, and must not import torch.
"""
