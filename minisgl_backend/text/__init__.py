"""Text in, text out: chat templates, tokenizing and incremental detokenizing.

Knows strings and token ids. Must not know Triton, pages, tensors or the network.
"""
