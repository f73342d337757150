"""The Triton sources. Importing a module here imports Triton, so only launching code does it.

Launchers take checked tensors, choose block sizes and a grid that depends on shapes alone, and
return nothing: outputs are arguments.

Triton compiles a kernel anew for each property of an argument that it is specialized on, which
takes half a second while requests wait. So kernels are not specialized on arguments of all
alignments and sizes: arrays by row, and numbers of rows.

Arguments that belong together come as one ``NamedTuple``. Not those that kernels are not to be
specialized on: Triton does not look into tuples for that. No field is named ``values`` or ``type``,
which Triton's tuples have.
"""
