"""A prompt -> token ids, by a checkpoint's tokenizer (``tokenizer_files``) and chat templates.

In a text, what is spelled like a special token becomes one only with ``parse_special_tokens``. A
chat is rendered as text by the template, which spells out control tokens; so in a chat such
spellings always become special tokens, even inside messages, as in transformers. A
beginning-of-sequence token is added if the tokenizer's files say so, and never twice.

A ``PromptEncoder`` may be used by several threads at once, and releases the GIL while it tokenizes.
Must not know Triton, or what the ids are used for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from minisgl_backend.errors import InvalidRequest, Unsupported
from minisgl_backend.limits import Limits
from minisgl_backend.request import IntArray, SamplingParams, TokenId
from minisgl_backend.text.chat_format import ChatFormat
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.length import LengthCheck, Room
from minisgl_backend.text.messages import parse_messages, parse_tools, parse_variables
from minisgl_backend.text.template import ChatTemplate
from minisgl_backend.text.tokenizer_files import load_tokenizer, template_sources, understood
from minisgl_backend.text.vocabulary import Vocabulary
from minisgl_backend.wire.generation import MessagesPrompt, Prompt, TextPrompt, TokenPrompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat rendered by its template, and what is known about the answer."""

    text: str
    format: ChatFormat


RenderedPrompt: TypeAlias = TextPrompt | TokenPrompt | RenderedChat
"""A prompt that can be tokenized: a chat is rendered."""


class PromptEncoder:
    """Turns prompts of all three kinds into token ids.

    ``templates`` holds the chat templates by name: "default", and optionally "tool_use" for chats
    with tools. ``context`` is the model's number of tokens: a longer prompt is refused, if possible
    before all of it is tokenized.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        templates: dict[str, ChatTemplate] | None = None,
        bos_token_id: TokenId | None = None,
        limits: Limits | None = None,
        context: int | None = None,
    ) -> None:
        from tokenizers import Tokenizer as Copy

        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocabulary = Vocabulary.of(tokenizer)
        self._limits = limits or Limits()
        self.context = context
        self._length = LengthCheck(tokenizer, self.vocabulary)
        self._templates = templates or {}
        self._bos_token_id = bos_token_id
        # Two copies, since how special tokens are read is a setting of the whole object.
        self._with_control = tokenizer
        self._plain = Copy.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True

    @classmethod
    def load(
        cls, folder: str | Path, limits: Limits | None = None, *, context: int | None = None
    ) -> PromptEncoder:
        """The encoder of a checkpoint's folder; raises ``ConfigError``."""
        limits = limits or Limits()
        with understood(folder):
            loaded = load_tokenizer(folder)
            templates = {
                name: ChatTemplate(source, loaded.special_tokens_map, max_chars=limits.prompt_bytes)
                for name, source in template_sources(loaded, Path(folder)).items()
            }
            return cls(
                loaded.backend_tokenizer,
                templates=templates,
                bos_token_id=loaded.bos_token_id,
                limits=limits,
                context=context,
            )

    def encode(self, prompt: RenderedPrompt, most_tokens: int | None = None) -> IntArray:
        """The prompt's token ids, int32[num_prompt_tokens], at least one. ``most_tokens`` is what a
        request may have, by the context and by the pages, if that is known.

        Raises ``InvalidRequest`` or ``Unsupported``.
        """
        room = None if self.context is None else Room.of(self.context, most_tokens)
        if isinstance(prompt, TokenPrompt):
            if room is not None and len(prompt.ids) > room.num_tokens:
                raise InvalidRequest(f"prompt of {len(prompt.ids)} tokens does not fit {room.told}")
            return self._checked(prompt)
        if isinstance(prompt, TextPrompt) and not prompt.text:
            raise InvalidRequest("text_input must not be empty")
        ids = self._ids(prompt, room)
        if not ids.size:
            raise InvalidRequest("the prompt has no tokens")
        return ids

    def look_up(self, prompt: RenderedPrompt) -> IntArray:
        """The token ids of a text or a chat, int32[num_tokens]; there may be none, or more than the
        context. A prompt of token ids is only checked.

        Raises ``InvalidRequest`` or ``Unsupported``.
        """
        if isinstance(prompt, TokenPrompt):
            return self._checked(prompt)
        return self._ids(prompt, None)

    def rendered(self, prompt: Prompt) -> RenderedPrompt:
        """The prompt, rendered if it is a chat."""
        return self.render_chat(prompt) if isinstance(prompt, MessagesPrompt) else prompt

    def render_chat(self, prompt: MessagesPrompt) -> RenderedChat:
        """The text of a chat, by the chat template.

        Raises ``InvalidRequest`` or ``Unsupported``.
        """
        limits = self._limits
        messages = parse_messages(prompt.messages, limits)
        tools = parse_tools(prompt.tools, limits) if prompt.tools is not None else None
        default = self._templates.get("default")
        of_tools = self._templates.get("tool_use") or default
        template = of_tools if tools else default
        if template is None or of_tools is None:
            raise InvalidRequest("messages need a chat template, and this model has none")
        given = prompt.variables
        variables = parse_variables(given, limits) if given is not None else None
        text = template.render(
            messages,
            tools or None,
            variables,
            add_generation_prompt=prompt.add_generation_prompt,
        )
        return RenderedChat(text, template.facts.of_prompt(text, tools=of_tools.facts))

    def after_thinking(self, sampling: SamplingParams, prompt: RenderedPrompt) -> SamplingParams:
        """``sampling`` with its grammar adapted to a chat: the grammar begins after the thoughts,
        if the answer may have any, or applies to the last message of an answer in channels.

        If a mark of optional thoughts is not a token, the answer cannot have thoughts, and the
        grammar holds from the first token. Raises ``Unsupported`` if the prompt has begun thoughts
        whose end is not a token.
        """
        grammar = sampling.grammar
        if grammar is None or not isinstance(prompt, RenderedChat):
            return sampling
        thinking = prompt.format.thinking
        if thinking is None:
            return sampling
        if prompt.format.has_channels:
            return replace(sampling, grammar=replace(grammar, channels=True))
        begin, end = map(self._with_control.token_to_id, thinking)
        if prompt.format.begins_thinking:
            if end is None:
                raise Unsupported(
                    f"a grammar after thoughts needs {thinking[1]} to be one token of the tokenizer"
                )
            begin = None
        elif begin is None or end is None:
            return sampling
        return replace(sampling, grammar=replace(grammar, begins_after=end, opened_by=begin))

    def names(self, ids: IntArray) -> list[str]:
        """The tokens as the vocabulary spells them; "" for an id with no token."""
        return [self.vocabulary.names[token_id] or "" for token_id in ids.tolist()]

    def text(self, ids: IntArray) -> str:
        """The text of tokens, special ones spelled out."""
        text: str = self._with_control.decode(ids.tolist(), skip_special_tokens=False)
        return text

    def prompt_text(
        self, prompt: Prompt, ids: IntArray, *, skip_special_tokens: bool = True
    ) -> str:
        """The prompt as text, for an answer that starts with it."""
        if isinstance(prompt, TextPrompt):
            return prompt.text
        stream = TextStream(self.vocabulary, skip_special_tokens=skip_special_tokens)
        return stream.push(ids.tolist(), final=True).text

    def check_token_ids(self, name: str, ids: Iterable[TokenId]) -> None:
        """Raise ``InvalidRequest`` if one of the ids is not in the vocabulary."""
        for token_id in ids:
            if not 0 <= token_id < len(self.vocabulary):
                last = len(self.vocabulary) - 1
                raise InvalidRequest(f"{name} must be in 0 .. {last}, got {token_id}")

    def _checked(self, prompt: TokenPrompt) -> IntArray:
        self.check_token_ids("input_ids", (prompt.ids.min(), prompt.ids.max()))
        return prompt.ids

    def _ids(self, prompt: TextPrompt | RenderedChat, room: Room | None) -> IntArray:
        """The ids, int32[num_tokens]. A text that is certainly too long for the ``room`` is refused
        before all of it is tokenized."""
        if isinstance(prompt, RenderedChat):
            text, tokenizer, add_special_tokens = prompt.text, self._with_control, False
        else:
            text, add_special_tokens = prompt.text, prompt.add_special_tokens
            tokenizer = self._with_control if prompt.parse_special_tokens else self._plain
        num_bytes = len(text.encode())
        if num_bytes > self._limits.prompt_bytes:
            most = self._limits.prompt_bytes
            raise InvalidRequest(f"the prompt must be at most {most} bytes, got {num_bytes}")
        if room is not None:
            self._length.check(tokenizer, text, num_bytes, room)
        # A batch of one: tokenizing a single text would keep the GIL.
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = np.array(encoding.ids, dtype=np.int32)
        if not (isinstance(prompt, TextPrompt) and prompt.parse_special_tokens):
            return ids
        doubled = len(ids) > 1 and ids[0] == ids[1] == self._bos_token_id
        return ids[1:] if doubled else ids
