"""How models are told about tools and call them, by family of models: the dialects.

A ``Dialect`` knows how calls are read out of an answer (``tool_calls``), and the structural tag
that keeps the engine to calls which follow their schemas. The tag's triggers are the openings that
the reader knows, so no call that is read has bypassed its schema. Must not know through which API a
request came.
"""
