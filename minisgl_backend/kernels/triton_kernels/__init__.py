"""The Triton sources. Importing a module here imports Triton, so only launching code does it.

Launchers take checked tensors, choose block sizes and a grid that depends only on shapes, and
return nothing: outputs are arguments.

Triton compiles a kernel anew for each property of an argument that it specializes on, which takes
half a second while requests wait. So kernels are not specialized on arguments that come in all
alignments and sizes, which are arrays by row and numbers of rows.

Arguments that belong together are passed as one ``NamedTuple``, except those that kernels must not
be specialized on, since Triton does not look into tuples for that. No field is named ``values`` or
``type``, since Triton's tuples have attributes of these names.
"""
