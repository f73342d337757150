"""API keys: who a caller is, by the header ``Authorization``, or Anthropic's ``x-api-key``.

Keys are compared by their digests, all of them each time, so that the time reveals nothing. A key
itself is neither logged nor passed on: its owner is known by a label and prefixes by a salt, both
derived from the key. Must not know what a caller asks for, or how much of it a key allows
(``admission``).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Container, Iterable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from minisgl_gateway.errors import ApiError
from minisgl_gateway.request_state import Caller


class Keys:
    """The keys in use; without any, every caller may ask.

    ``origins`` are those whose pages may ask without a key, besides pages without a host's name.
    """

    def __init__(self, keys: Iterable[str], origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)
        self._callers: dict[bytes, Caller] = {}
        for key in keys:
            data = key.encode()
            label = _derived(data, b"label")[:8]
            self._callers[_digest(data)] = Caller(label, _derived(data, b"prefix cache")[:32])

    def caller(self, headers: Sequence[tuple[bytes, bytes]]) -> Caller:
        """Who sends these headers; raises ``ApiError`` 401, or 403 for a page from elsewhere."""
        if not self._callers:
            _check_page(headers, self._origins)
            return Caller()
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            keys = [value for name, value in headers if name == b"x-api-key"]
            given = [b"Bearer " + key for key in keys]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = _digest(key.strip())
        found = None
        for known, caller in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != b"bearer":
            reason = "no API key is given" if not given else "the API key is not known"
            raise ApiError(
                401, reason, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )
        return found


def _check_page(headers: Sequence[tuple[bytes, bytes]], origins: Container[str]) -> None:
    """Refuse a web page from elsewhere: a browser on this machine would ask in its user's name.

    The name of such a page may still resolve to this machine (DNS rebinding), so its address must
    be one that no name server controls.
    """
    for name, value in headers:
        origin = value.decode("latin-1")
        if name == b"origin" and origin not in origins and not _has_no_name(origin):
            raise ApiError(
                403,
                "without API keys a page must come from localhost or an IP address",
                code="origin_refused",
            )


def _has_no_name(origin: str) -> bool:
    """Whether the host of a page is localhost or an IP address."""
    try:
        host = urlsplit(origin).hostname or ""
        if host != "localhost" and not host.endswith(".localhost"):
            ip_address(host)
    except ValueError:
        return False
    return True


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _derived(key: bytes, purpose: bytes) -> str:
    return hmac.new(key, b"minisgl " + purpose, hashlib.sha256).hexdigest()
