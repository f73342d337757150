"""Exit with 0 if the server makes a token, or an embedding if its model makes nothing else; for an
image's HEALTHCHECK.

Needs the standard library alone. A server whose queue is full says so at once, and is not ill.
With ``--get`` it asks for a page instead, such as the gateway's /health.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any


def ask(url: str, timeout_s: float) -> str | None:
    """What is wrong with the server at ``url``; None if it is well."""
    problem = _ask(url, {"max_tokens": 1}, timeout_s)
    if problem is not None and "embed must be true" in problem:
        return _ask(url, {"embed": True}, timeout_s)
    return problem


def _ask(url: str, asked: dict[str, Any], timeout_s: float) -> str | None:
    # ahead of the queue: a long queue is not an illness
    body = {
        "text_input": "1",
        "priority_level": 100,
        "timeout_ms": int(timeout_s * 1000),
        **asked,
    }
    request = urllib.request.Request(
        f"{url}/v2/models/minisgl/generate", data=json.dumps(body).encode()
    )
    try:
        with _open(request, timeout_s + 1) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        return None if "UNAVAILABLE: queue" in text else f"HTTP {error.code}: {text}"
    except OSError as error:
        return f"no answer: {error}"
    is_answer = "text_output" in answer or "embedding" in answer
    return None if is_answer else f"not an answer: {answer}"


def get(url: str, timeout_s: float) -> str | None:
    """What is wrong with the page at ``url``; None if there is one."""
    try:
        with _open(url, timeout_s):
            return None
    except OSError as error:
        return f"no answer: {error}"


def _open(target: str | urllib.request.Request, timeout_s: float) -> Any:
    """Ask the server itself: Docker tells its containers of proxies, and they know no loopback."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return opener.open(target, timeout=timeout_s)


def main() -> None:
    """Ask once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--get", metavar="URL", help="ask for this page, not for a token")
    parser.add_argument("--timeout-s", type=float, default=10.0)
    arguments = parser.parse_args()
    if arguments.get:
        problem = get(arguments.get, arguments.timeout_s)
    else:
        problem = ask(arguments.url.rstrip("/"), arguments.timeout_s)
    if problem is not None:
        sys.exit(problem)


if __name__ == "__main__":
    main()
