"""An engine that uses tools as a trained model would, for the tests of agents.

What it would like to say depends on its prompt: asked with tools, it calls ``weather``; told what
the tool answered, it says ``ANSWER``, or if the answer must have a form, ``REPORT``: as JSON, or as
a call of the tool ``final_result`` if it must call one. Asked without tools, it answers at once.
A grammar overrules that: what a step's mask forbids is left out, as a model with the same wishes
would do. What it says ends with the token that ends a turn.

Planner, loop, grammars and everything around them are real; no model is computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from minisgl_backend.build import build_grammars
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.execution.ranks import RankExecutor
from minisgl_backend.grammar.matchers import WORD, Grammars
from minisgl_backend.parts import Parts
from minisgl_backend.plan import Pending, SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, Grammar, GrammarKind, IntArray, Request, RequestId
from minisgl_backend.runtime import ports
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.wire.generation import TextPrompt
from minisgl_bench.paced import paced_engine
from minisgl_kit.wrappers import ExecutorWrapper, PendingWrapper, SchedulerWrapper


def _call(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


WORDS: Final = "I will look it up."
CALL: Final = _call("weather", {"city": "Bogotá"})
ANSWER: Final = "It rains in Bogotá."
REPORT: Final[dict[str, Any]] = {"city": "Bogotá", "rains": True, "degrees": 12}
_END: Final = "<|im_end|>"
_TOOLS: Final = "<tools>"
_TOLD: Final = "<tool_response>"
_JSON: Final = frozenset({GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT})
TEMPLATE: Final = r"""
{%- set system = messages[0].content if messages[0].role == 'system' -%}
{%- if system or tools -%}
{{- '<|im_start|>system\n' + (system or '') -}}
{%- if tools -%}
{{- '\n# Tools\nYou may call these functions:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\n</tools>\nA call is a JSON object:\n<tool_call>\n' -}}
{{- '{"name": <name>, "arguments": <arguments>}\n</tool_call>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif message.role != 'system' -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""Tool calls and results as in models of the Hermes dialect."""


def model_of_agents(folder: Path, template: str = TEMPLATE) -> Path:
    """The demo model with this chat template, in ``folder``."""
    model = folder / "model"
    model.mkdir()
    for file in Path(DEMO_MODEL).iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    (model / "tokenizer_config.json").unlink()
    config["chat_template"] = template
    (model / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return model


def _wish(prompt: str, grammar: Grammar | None) -> str:
    """What a trained model would like to say."""
    if _TOOLS in prompt and _TOLD not in prompt:
        return f"{WORDS}\n{CALL}"
    if grammar is not None and (grammar.kind in _JSON or '"otherwise":' in grammar.source):
        return json.dumps(REPORT, ensure_ascii=False)
    if '"final_result"' in prompt:
        return _call("final_result", REPORT)
    return ANSWER


class TritonPythonModel(llm_engine.TritonPythonModel):
    """What Triton loads in place of the shipped `llm_engine`."""

    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        encoder = PromptEncoder.load(options.model)
        speakers: dict[RequestId, _Speaker] = {}

        def ids(text: str) -> IntArray:
            return encoder.encode(TextPrompt(text, parse_special_tokens=True))

        def speaker(request: Request) -> _Speaker:
            pieces = encoder.vocabulary.pieces
            prompt = b"".join(pieces[token] for token in request.prompt.tolist())
            wish = _wish(prompt.decode("utf-8", "replace"), request.sampling.grammar)
            return _Speaker(ids(wish + _END))

        def engine(
            info: EngineInfo,
            scheduler: ports.Scheduler,
            executor: ports.Executor,
            *,
            overlap: bool,
            grammars: Grammars | None = None,
            adapters: Adapters | None = None,
        ) -> Engine:
            info = replace(info, folder=options.model, eos_token_ids=tuple(ids(_END).tolist()))
            grammars = build_grammars(
                options, Path(info.folder), info.vocab_size, info.eos_token_ids
            )
            return Engine(
                info, scheduler, executor, overlap=overlap, grammars=grammars, adapters=adapters
            )

        parts = Parts(
            engine=engine,
            scheduler=lambda cache, config: _Listener(Scheduler(cache, config), speaker, speakers),
            executor=lambda executor: _Voice(executor, speakers, len(encoder.vocabulary)),
        )
        return paced_engine(options, step_s=0.002, parts=parts)


class _Speaker:
    """What one request would like to say, and how far it has got."""

    def __init__(self, wish: IntArray) -> None:
        self._wish = wish.tolist()
        self._at = 0

    def next(self, mask: IntArray | None) -> int:
        """The next allowed token; ``mask``, int32[num_words], is None if all are allowed."""
        while mask is not None and not _is_allowed(self._wish[self._at % len(self._wish)], mask):
            self._at += 1
            if self._at >= len(self._wish):  # it must say more than it wished
                return next(token for token in range(WORD * len(mask)) if _is_allowed(token, mask))
        token: int = self._wish[self._at % len(self._wish)]
        self._at += 1
        return token


def _is_allowed(token: int, mask: IntArray) -> bool:
    return bool(int(mask[token // WORD]) >> (token % WORD) & 1)


class _Listener(SchedulerWrapper):
    """A planner that learns what each request would like to say."""

    def __init__(
        self,
        scheduler: ports.Scheduler,
        speaker: Callable[[Request], _Speaker],
        speakers: dict[RequestId, _Speaker],
    ) -> None:
        super().__init__(scheduler)
        self._speaker = speaker
        self._speakers = speakers

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        self._speakers[request.id] = self._speaker(request)
        super().add(request, generated, num_scored)


class _Voice(ExecutorWrapper):
    """An executor whose rows say what their requests would like to say."""

    def __init__(
        self, executor: RankExecutor, speakers: dict[RequestId, _Speaker], vocab_size: int
    ) -> None:
        super().__init__(executor)
        self._speakers = speakers
        self._num_words = -(-vocab_size // WORD)
        self._by_row: dict[int, _Speaker] = {}

    def launch(self, plan: StepPlan) -> Pending:
        for admission in plan.admissions:
            self._by_row[admission.row] = self._speakers.pop(admission.request_id)
        said_by = [self._by_row[row] for row in plan.sample_rows.tolist()]
        return _Said(super().launch(plan), said_by, self._num_words)


class _Said(PendingWrapper):
    """A step that samples what its rows say under their masks; ``said_by`` has the speaker of each
    sample."""

    def __init__(self, step: Pending, said_by: list[_Speaker], num_words: int) -> None:
        super().__init__(step)
        self._said_by = said_by
        self._num_words = num_words
        self._written: IntArray = EMPTY
        self._masks: dict[int, IntArray] = {}

    def masks(self, num_masks: int) -> IntArray:
        self._written = np.empty((num_masks, self._num_words), np.int32)
        return self._written

    def mask(self, samples: IntArray) -> None:
        self._masks = dict(zip(samples.tolist(), self._written, strict=True))

    def tokens(self) -> SampledTokens:
        super().tokens()
        told = [speaker.next(self._masks.get(at)) for at, speaker in enumerate(self._said_by)]
        return SampledTokens(np.array(told, np.int32))
