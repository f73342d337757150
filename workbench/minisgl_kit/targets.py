"""Servers as a load generator sees them: a call goes in, chunks come out, or an error's code.

``TritonTarget`` talks to the ensemble over gRPC or HTTP through `minisgl_client`; ``OpenAITarget``
to any endpoint that is compatible with OpenAI's API, by server-sent events. Must not know when
calls are sent, or what their times are used for.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import httpx
from minisgl_client.client import AsyncClient
from minisgl_client.errors import MinisglError

from minisgl_backend.errors import ConfigError
from minisgl_kit.calls import Call, Chunk

_MOST_SHOWN: Final = 300
"""Characters of an answer that are shown as a reason."""
_TEXTS: Final = ("content", "reasoning_content", "reasoning")
"""What has text in a piece of a chat: thoughts are tokens, too, and servers name them so or so."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters and cache salt, the same for all calls."""

    temperature: float = 0.0
    ignore_eos: bool = True
    cache_salt: str | None = None


class Refused(Exception):
    """The call failed; errors are counted by ``code``, and ``reason`` is a message for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class Target(Protocol):
    """A server that answers calls."""

    def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """The answer in chunks; raises ``Refused``. Closing the iterator cancels the call."""

    async def close(self) -> None:
        """Close the connections."""


class TritonTarget:
    """The ensemble on a tritonserver. ``protocol`` is grpc or http; None: as in the URL."""

    def __init__(
        self,
        url: str,
        *,
        protocol: Literal["grpc", "http"] | None,
        model: str,
        sampling: Sampling,
    ) -> None:
        try:
            self._client = AsyncClient(url, protocol=protocol, model=model, retries=0)
        except MinisglError as error:
            raise ConfigError(str(error)) from error
        self._sampling = sampling

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        try:
            answer = self._client.stream(
                call.text,
                messages=call.messages,
                input_ids=call.input_ids,
                max_tokens=call.max_tokens,
                temperature=self._sampling.temperature,
                ignore_eos=self._sampling.ignore_eos,
                cache_salt=self._sampling.cache_salt,
            )
            async with answer:
                async for delta in answer:
                    yield Chunk(
                        bool(delta.text or delta.num_output_tokens),
                        delta.num_output_tokens,
                        delta.num_input_tokens,
                        delta.num_cached_tokens,
                    )
        except MinisglError as error:
            raise Refused(error.code, str(error)) from error

    async def close(self) -> None:
        await self._client.aclose()


class OpenAITarget:
    """Messages go to /v1/chat/completions, texts and token ids to /v1/completions."""

    def __init__(
        self, url: str, *, model: str | None, api_key: str | None, sampling: Sampling
    ) -> None:
        # in UTF-8: a server may have keys that are not ASCII
        headers = [(b"Authorization", f"Bearer {api_key}".encode())] if api_key else []
        # a load generator opens as many connections as it has requests in flight
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        if "://" not in url:
            url = f"http://{url}"
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            limits=limits,
            timeout=httpx.Timeout(None, connect=10),
            trust_env=False,  # a proxy would be measured too
        )
        self._model = model
        self._sampling = sampling

    async def stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        body: dict[str, Any] = {
            "model": await self._model_name(),
            "max_tokens": call.max_tokens,
            "temperature": self._sampling.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._sampling.ignore_eos:  # an extension, unknown to some servers
            body["ignore_eos"] = True
        if self._sampling.cache_salt is not None:  # so is this
            body["cache_salt"] = self._sampling.cache_salt
        if call.messages is None:
            path = "/v1/completions"
            body["prompt"] = call.input_ids if call.text is None else call.text
        else:
            path = "/v1/chat/completions"
            body["messages"] = call.messages
        # with escapes, since a file of prompts may have half of a surrogate pair
        content = json.dumps(body).encode()
        json_header = {"Content-Type": "application/json"}
        try:
            async with self._client.stream(
                "POST", path, content=content, headers=json_header
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise Refused(f"HTTP {response.status_code}", _reason(response.text))
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data != line and data != "[DONE]":
                        yield chunk_of_event(data)
        except httpx.HTTPError as error:
            raise Refused(type(error).__name__, str(error)) from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _model_name(self) -> str:
        """The model asked for, else the first that the server offers."""
        if self._model is None:
            try:
                response = await self._client.get("/v1/models")
                response.raise_for_status()
                self._model = str(response.json()["data"][0]["id"])
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                raise ConfigError(f"the server does not tell its models: {error}") from error
        return self._model


def chunk_of_event(data: str) -> Chunk:
    """The chunk in an event's JSON; raises ``Refused`` if it is an error, or no JSON object."""
    try:
        event = json.loads(data)
    except ValueError:
        raise Refused("not JSON", _shortened(data)) from None
    if not isinstance(event, dict):
        raise Refused("not an event", _shortened(data))
    if (error := event.get("error")) is not None:
        told = error if isinstance(error, dict) else {}
        raise Refused(str(told.get("code") or told.get("type") or "error"), _reason(data))
    has_text = any(
        choice.get("text") or any((choice.get("delta") or {}).get(name) for name in _TEXTS)
        for choice in event.get("choices") or ()
    )
    usage = event.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    return Chunk(
        has_text,
        usage.get("completion_tokens"),
        usage.get("prompt_tokens"),
        details.get("cached_tokens"),
    )


def _reason(body: str) -> str:
    """The message of OpenAI's error object, or an error that is a string; for other bodies, their
    beginning."""
    try:
        error = json.loads(body)["error"]
        return _shortened(error if isinstance(error, str) else str(error["message"]))
    except (ValueError, LookupError, TypeError):
        return _shortened(body)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 3]}..."
