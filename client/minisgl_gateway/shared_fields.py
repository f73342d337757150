"""Fields, and limits on fields, that requests of several APIs of the gateway have.

Most are without effect: clients send them, and the answer does not depend on them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from minisgl_gateway.strict_schema import Strict

MAX_MESSAGES: Final = 8192
"""The most messages or items of a conversation: agents make thousands of calls. The body's size
bounds them, too."""

MAX_TOOLS: Final = 1024
"""The most tools of a request, as many as the engine's chat templates take: agents with MCP servers
have hundreds."""

MAX_LOGPROBS: Final = 20

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
"""How fast, and how dear, OpenAI answers."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]


def salt() -> Any:
    """The field ``cache_salt``, by default none."""
    return Field(None, min_length=1, description="prefixes are shared under equal salts only")


def label(description: str = "a label; no effect") -> Any:
    """A field that is accepted with any value. If it is a body's, it must be in
    ``Body.without_effect``, too, and a header of the answer names it."""
    return Field(None, description=description)


class PromptCacheOptions(Strict):
    """How long prefixes are to stay; here they stay while there is room."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = None
    prewarm: Literal[False] | None = None


class RefusalPart(Strict):
    """A piece of an earlier answer of another model."""

    type: Literal["refusal"]
    refusal: str


class DirectCaller(Strict):
    """Who called a tool: the model itself."""

    type: Literal["direct"]


def cache_control() -> Any:
    """Where a caller would have a prefix end; here all prefixes are cached."""
    return Field(None, exclude=True, description="prefixes are always cached; no effect")


def read_by_sdk() -> Any:
    """What OpenAI's SDK adds to an answer when it parses it, and sends back; not for the model."""
    return Field(None, exclude=True, description="from OpenAI's SDK; no effect")
