"""The engine in process: ``LLM``, what it is asked and what it returns.

Knows the engine and the checks of requests that the server makes (``tritonserver.wire``). Must not
know Triton's processes or its modules.
"""
