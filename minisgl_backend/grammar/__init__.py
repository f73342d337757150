"""Grammars: which tokens may follow in an answer of a given form.

``sources`` turns what a request brings into a grammar for llguidance, ``vetting`` tries such a
grammar out in a process of its own, ``compiler`` makes sure that no grammar waits for long and that
each is compiled once, and ``matchers`` follows the answers of requests and fills the masks for
their next tokens. Must not know the engine's loop, pages, tensors or Triton.
"""
