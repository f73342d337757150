"""Text in, text out: chat templates, tokenizing, incremental detokenizing, streams of answers.

Knows strings, token ids, and the values of the wire. Must not know Triton, pages, tensors or the
network.
"""
