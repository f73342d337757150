"""The Triton sources. Importing a module here imports Triton, so only launching code does it.

Launchers take checked tensors, choose block sizes and a grid that depends on shapes alone, and
return nothing: outputs are arguments.
"""
