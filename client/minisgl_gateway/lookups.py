"""What callers look up without generating: the model, tokens, the text of tokens.

Knows the engine through ``Engine`` only, and uses only its tokenizer: a lookup takes no place in a
queue, none of a key's places, and no step of the engine. Must not know how answers are generated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from minisgl_client.answer import ChatFormat, Tokens
from minisgl_client.errors import InvalidArgument, MinisglError
from starlette.requests import Request

from minisgl_gateway import answer_schema as schema
from minisgl_gateway.adapters import Adapters
from minisgl_gateway.body import received
from minisgl_gateway.chat import Chat
from minisgl_gateway.completions.answers import Echo
from minisgl_gateway.completions.schema import DetokenizeRequest, TokenizeRequest
from minisgl_gateway.completions.translation import lookup_of
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.errors import deadline_passed, no_model
from minisgl_gateway.gateway_options import GatewayOptions
from minisgl_gateway.generation import Generation
from minisgl_gateway.request_state import state_of
from minisgl_gateway.servers import Engine
from minisgl_gateway.template import Template, probe_of

_ANSWER_S: Final = 2.0
"""How long the list of models waits for the engine."""
_KNOWN_S: Final = 10.0
_UNKNOWN_S: Final = 1.0
_MOST_FORMATS: Final = 64


@dataclass(frozen=True, slots=True)
class _Format:
    """What a chat template shows, as soon as the engine has answered (None if that is not known),
    and until when this is used."""

    asked: asyncio.Future[ChatFormat | None]
    until_s: float


class Lookups:
    """The lookups of one gateway."""

    def __init__(self, options: GatewayOptions, engine: Engine, adapters: Adapters) -> None:
        self._options = options
        self._adapters = adapters
        self._engine = engine
        self._started = int(time.time())
        self._asking = asyncio.Lock()
        self._context: int | None = None
        self._asked_again_s = 0.0
        self._formats: dict[bytes, _Format] = {}
        """By what determines them; those asked for last are at the end."""

    async def models(self) -> schema.ModelList:
        """GET /v1/models: the base model, and each LoRA adapter with it as the parent."""
        base, most = self._options.model_name, await self._max_model_len()
        adapters = await self._adapters.known()
        models = [(base, base, None), *((name, path, base) for name, path in adapters.items())]
        return schema.ModelList(
            data=[
                schema.Model(
                    id=name, created=self._started, root=root, parent=parent, max_model_len=most
                )
                for name, root, parent in models
            ]
        )

    async def model(self, name: str) -> schema.Model:
        """GET /v1/models/{name}; raises ``ApiError`` 404."""
        await self._adapters.of_model(name)
        for model in (await self.models()).data:
            if model.id == name:
                return model
        raise no_model(name)  # an adapter that was unloaded meanwhile

    async def tokenize(self, http: Request) -> schema.Tokenized:
        """POST /tokenize; raises ``ApiError``."""
        request = await received(TokenizeRequest, http)
        await self._adapters.of_model(request.model)
        asked, fields = lookup_of(request), TokenizeRequest.model_fields
        if isinstance(asked, Chat):
            tokens = await self.chat_tokens(http, asked, fields)
        else:
            tokens = await self._tokens(http, asked, fields)
        return schema.Tokenized(
            count=len(tokens.ids),
            max_model_len=tokens.max_sequence_length,
            tokens=list(tokens.ids),
            token_strs=list(tokens.strs) if request.return_token_strs else None,
        )

    async def detokenize(self, http: Request) -> schema.Detokenized:
        """POST /detokenize; raises ``ApiError``."""
        request = await received(DetokenizeRequest, http)
        await self._adapters.of_model(request.model)
        if not request.tokens:
            return schema.Detokenized(prompt="")
        given = {"input_ids": request.tokens}
        tokens = await self._tokens(http, given, DetokenizeRequest.model_fields)
        return schema.Detokenized(prompt=tokens.text)

    async def chat_tokens(self, http: Request, chat: Chat, fields: Container[str]) -> Tokens:
        """The tokens of a chat's prompt; raises ``ApiError``, which names one of ``fields``."""
        template = await self.template(http, chat, fields, {})
        messages, tools, parameters = chat.rendering(template)
        given = {"messages": messages, "tools": tools, **parameters}
        return await self._tokens(http, given, fields)

    async def text_tokens(self, http: Request, text: str, **parameters: Any) -> tuple[int, ...]:
        """The tokens of a text by itself, without any that the tokenizer puts around it; raises
        ``ApiError``."""
        given = {"prompt": text, "add_special_tokens": False, **parameters}
        return (await self._tokens(http, given, ())).ids

    async def template(
        self,
        http: Request,
        chat: Chat,
        fields: Container[str],
        names: Mapping[str, str],
    ) -> Template:
        """The chat template as it is for a chat; raises ``ApiError`` (see
        ``engine_errors.api_error``).

        What it shows is looked up, and kept for some seconds under what determines it. If a
        template refuses even a chat of one word, what it shows is not known.
        """
        try:
            probe, given = probe_of(chat.messages), chat.wishes.variables
            chat_format = await self._chat_format(http, chat, probe, given)
            if (variables := chat.wishes.variables_for(chat_format)) != given:
                chat_format = await self._chat_format(http, chat, probe, variables)
        except MinisglError as error:
            raise api_error(error, fields, names) from error
        return chat.template(chat_format, self._options.tool_dialect)

    async def _chat_format(
        self,
        http: Request,
        chat: Chat,
        probe: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> ChatFormat | None:
        decides = json.dumps([probe, chat.add_generation_prompt, variables], sort_keys=True)
        key = hashlib.sha256(decides.encode()).digest()
        found = self._formats.get(key)
        if found is None or time.monotonic() >= found.until_s:
            asked = asyncio.ensure_future(
                self._ask_format(probe, chat.add_generation_prompt, variables)
            )
            asked.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            found = _Format(asked, time.monotonic() + _KNOWN_S)
            self._formats.pop(key, None)
            while len(self._formats) >= _MOST_FORMATS:
                self._formats.pop(next(iter(self._formats)))
            self._formats[key] = found
        try:
            # others wait for the same answer
            return await asyncio.wait_for(asyncio.shield(found.asked), _left_ms(http) / 1000)
        except asyncio.TimeoutError:
            raise deadline_passed() from None
        except MinisglError:
            if self._formats.get(key) is found:
                del self._formats[key]
            raise

    async def _ask_format(
        self,
        probe: Sequence[Mapping[str, Any]],
        begins_answer: bool,
        variables: Mapping[str, Any],
    ) -> ChatFormat | None:
        try:
            tokens = await self._engine.tokenize(
                messages=probe,
                chat_template_kwargs=variables or None,
                add_generation_prompt=begins_answer,
                timeout_ms=round(self._options.timeout_s * 1000),
            )
        except InvalidArgument:
            return None
        return tokens.chat_format

    async def echo(self, generation: Generation, *, scored: bool) -> Echo:
        """The prompt as it comes before an answer, with its first token if it is ``scored``.

        Raises ``MinisglError``.
        """
        given: dict[str, Any] = {"timeout_ms": generation.parameters.get("timeout_ms")}
        text, ids = generation.prompt, generation.input_ids
        if text is None:
            text = (await self._engine.tokenize(input_ids=ids, **given)).text
        elif scored:
            ids = await self.prompt_ids(generation)
        if not scored or not ids:
            return Echo(text)
        return Echo(text, (await self._engine.tokenize(input_ids=ids[:1], **given)).text)

    async def prompt_ids(self, generation: Generation) -> Sequence[int]:
        """The tokens of a completion's prompt; raises ``MinisglError``."""
        text, parameters = generation.prompt, generation.parameters
        if text is None:
            return generation.input_ids or ()
        tokens = await self._engine.tokenize(
            text,
            add_special_tokens=parameters.get("add_special_tokens"),
            timeout_ms=parameters.get("timeout_ms"),
        )
        return tokens.ids

    async def _tokens(
        self, http: Request, given: Mapping[str, Any], fields: Container[str]
    ) -> Tokens:
        """What the tokenizer answers; errors name one of ``fields``, those of the request."""
        try:
            return await self._engine.tokenize(**given, timeout_ms=_left_ms(http))
        except MinisglError as error:
            raise api_error(error, fields) from error

    async def _max_model_len(self) -> int | None:
        """The model's context; one answer of the engine serves all who ask within a while."""
        async with self._asking:
            if time.monotonic() >= self._asked_again_s:
                try:
                    told = await asyncio.wait_for(self._engine.tokenize(input_ids=[0]), _ANSWER_S)
                    self._context = told.max_sequence_length
                except (MinisglError, asyncio.TimeoutError):
                    self._context = None
                known_s = _UNKNOWN_S if self._context is None else _KNOWN_S
                self._asked_again_s = time.monotonic() + known_s
            return self._context


def _left_ms(http: Request) -> int:
    """The time left until the deadline of a request."""
    return max(1, round(state_of(http.scope).left_s * 1000))
