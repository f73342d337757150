"""LoRA adapters: to callers, models of their own; to the operator, things to load and unload.

Knows the engine through ``Engine`` only. The list of adapters is fetched again after some seconds,
and when a caller names a model that is not in it. Must not know what requests ask for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from minisgl_client.answer import LoraAdapter
from minisgl_client.errors import InvalidArgument, MinisglError
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from minisgl_gateway.body import received
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.errors import ApiError, invalid, no_model, shown
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.keys import Keys
from minisgl_gateway.request_state import state_of
from minisgl_gateway.servers import Engine
from minisgl_gateway.shared_fields import label
from minisgl_gateway.strict_schema import Body

_ANSWER_S: Final = 2.0
"""How long the engine may take to list its adapters."""
_KNOWN_S: Final = 10.0
_UNKNOWN_S: Final = 1.0
"""A name that is not in the list fetches it again only if the list is at least this old."""


class LoadAdapterRequest(Body):
    """An adapter to be loaded, in vLLM's form."""

    lora_name: str = Field(min_length=1, description="the model that callers may then ask for")
    lora_path: str = Field(min_length=1, description="its folder on the engine's machine")
    base_model_name: str | None = label("from the sidecar of Gateway API Inference Extension")

    not_offered = MappingProxyType({"load_inplace": (False,)})
    without_effect = frozenset({"base_model_name"})


class UnloadAdapterRequest(Body):
    """An adapter to be unloaded, in vLLM's form."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = label("vLLM's number of the adapter; no effect")

    without_effect = frozenset({"lora_int_id"})


class Adapters:
    """The adapters behind one gateway."""

    def __init__(self, options: GatewayOptions, engine: Engine) -> None:
        self._base = options.model_name
        self._engine = engine
        self._operators = Keys(options.admin_keys) if options.admin_keys else None
        self._asking = asyncio.Lock()
        self._paths: dict[str, str] = {}
        self._asked_s = -_KNOWN_S

    async def known(self, *, for_s: float = _KNOWN_S) -> Mapping[str, str]:
        """The paths of all adapters by name, at most ``for_s`` old; the last ones known if the
        engine does not answer."""
        async with self._asking:
            if time.monotonic() - self._asked_s >= for_s:
                before_s = self._asked_s
                try:
                    found = await asyncio.wait_for(self._engine.adapters(), _ANSWER_S)
                except (MinisglError, asyncio.TimeoutError):
                    self._asked_s = time.monotonic()
                else:
                    if self._asked_s == before_s:  # no load or unload has told a later list
                        self._keep(found)
            return self._paths

    async def of_model(self, name: str | None) -> str | None:
        """The adapter that a model stands for; None is the base model, under its name or none.

        Raises ``ApiError`` 404."""
        if name in (None, self._base):
            return None
        if name in await self.known() or name in await self.known(for_s=_UNKNOWN_S):
            return name
        assert name is not None
        raise no_model(name)

    async def load(self, http: Request) -> Response:
        """POST /v1/load_lora_adapter; raises ``ApiError``."""
        self._check_operator(http)
        request = await received(LoadAdapterRequest, http)
        if request.lora_name == self._base:
            raise invalid(
                f"lora_name must not be {shown(self._base)}, the base model's", "lora_name"
            )
        try:
            self._keep(await self._engine.load_adapter(request.lora_name, request.lora_path))
        except MinisglError as error:
            raise api_error(error, LoadAdapterRequest.model_fields) from error
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload(self, http: Request) -> Response:
        """POST /v1/unload_lora_adapter; raises ``ApiError``."""
        self._check_operator(http)
        request = await received(UnloadAdapterRequest, http)
        try:
            self._keep(await self._engine.unload_adapter(request.lora_name))
        except MinisglError as error:
            refused = api_error(error, UnloadAdapterRequest.model_fields)
            if isinstance(error, InvalidArgument):  # there is none with this name
                refused = ApiError(404, str(error), code="model_not_found", param="lora_name")
            raise refused from error
        return PlainTextResponse(
            f"Success: LoRA adapter '{request.lora_name}' removed successfully."
        )

    def _check_operator(self, http: Request) -> None:
        if self._operators is None:
            raise ApiError(
                403,
                "adapters are loaded and unloaded with an admin key, and this gateway has none",
                code="admin_key_needed",
            )
        try:
            self._operators.caller(http.scope["headers"])
        except ApiError as error:
            if not state_of(http.scope).caller.label:
                raise
            raise ApiError(
                403,
                "adapters are loaded and unloaded with an admin key, and this API key is none",
                code="admin_key_needed",
            ) from error

    def _keep(self, adapters: Sequence[LoraAdapter]) -> None:
        """Keep the list. An adapter with the base model's name, which callers cannot ask for, is
        left out."""
        self._paths = {each.name: each.path for each in adapters if each.name != self._base}
        self._asked_s = time.monotonic()
