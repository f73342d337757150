"""The engine in process: ``LLM``, its prompts and its outputs.

Knows the engine and the checks of requests that the server makes (``tritonserver.wire``). Must not
know Triton's processes or its modules.
"""
