"""The engine in process: ``LLM``, its prompts and its outputs.

Knows the engine, the checks of requests that the server makes (``wire``), and ``text``. Must not
know Triton: nothing of ``tritonserver`` is imported.
"""
