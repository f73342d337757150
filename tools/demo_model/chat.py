"""The special tokens and the chat template, and how a conversation is written with them."""

from __future__ import annotations

from typing import Final

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, IM_START, IM_END)
"""In the order of their ids, from 0."""

TOOLS_HEAD: Final = "# Tools\n\nYou may call these functions:\n<tools>"
TOOLS_TAIL: Final = "\n</tools>"

CHAT_TEMPLATE: Final = (
    "{%- set start = 0 -%}\n"
    "{%- if messages[0].role == 'system' -%}\n"
    "{%- set start = 1 -%}\n"
    "{%- endif -%}\n"
    "{%- if start == 1 or tools -%}\n"
    "{{- '<|im_start|>system\\n' -}}\n"
    "{%- if start == 1 -%}{{- messages[0].content -}}{%- endif -%}\n"
    "{%- if tools -%}\n"
    "{%- if start == 1 -%}{{- '\\n\\n' -}}{%- endif -%}\n"
    "{{- " + repr(TOOLS_HEAD) + " -}}\n"
    "{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}\n"
    "{{- " + repr(TOOLS_TAIL) + " -}}\n"
    "{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- for message in messages[start:] -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' -}}\n"
    "{%- if message.content is string -%}{{- message.content -}}\n"
    "{%- elif message.content -%}\n"
    "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}\n"
    "{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)
"""ChatML; the system message may be missing, and tools go into it as JSON, one per line."""


def turn(role: str, content: str) -> str:
    """One turn of a conversation, as CHAT_TEMPLATE writes it."""
    return f"{IM_START}{role}\n{content}{IM_END}\n"
