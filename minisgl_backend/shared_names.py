"""Names on which whoever starts a server and the server's models agree.

Knows nothing else: neither side imports the other. The files are in the server's runtime directory,
and empty; what they mean is told in ``tritonserver.signs``.
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
"""How the name of an engine's sign begins, which is there while it serves."""
