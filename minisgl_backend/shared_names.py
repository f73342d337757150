"""Names that a server's models share with whoever starts the server.

Knows nothing else: neither side imports the other. The files are empty and lie in the server's
runtime directory; ``tritonserver.signs`` explains what they mean.
"""

from __future__ import annotations

from typing import Final

RUNTIME_DIRECTORY_VARIABLE: Final = "MINISGL_RUNTIME_DIR"
"""Tells the models where their sockets and signs belong."""
HTTP_URL_VARIABLE: Final = "MINISGL_HTTP_URL"
"""Tells the models where their own server listens."""
OPTIONS_MODEL: Final = "llm_engine"
"""The model whose config.pbtxt holds the engine's options, for the text models too."""
DRAIN_FILE: Final = "drain"
"""Its presence asks engines to take no more requests, and to end."""
RECOVERING_FILE: Final = "recovering"
"""Its presence asks tokenizers to take no requests for now."""
QUEUE_OPEN: Final = "queue-open"
QUEUE_FULL: Final = "queue-full"
"""The beginning of the name of an engine's sign, a file that exists while the engine serves."""
