"""The Triton sources. Importing a module here imports Triton, so only launching code does it.

Launchers take checked tensors, choose block sizes and a grid that depends on shapes alone, and
return nothing: outputs are arguments.

A kernel is compiled anew for each property of an argument that it is specialized on, which takes
half a second while requests wait. So kernels are not specialized on what comes in all alignments
and sizes: arguments by row, and numbers of rows.
"""
