"""Grammars: which tokens may follow in an answer of a given form.

``sources`` turns what a request brings into a grammar of llguidance, ``vetting`` tries such a
grammar out in a process of its own, and ``matchers`` follows the answers of requests and fills the
masks of their next tokens. Must not know the engine's loop, pages, tensors or Triton.
"""
