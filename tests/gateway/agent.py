"""An engine that uses tools as a trained model would: for the tests of agents.

Asked with tools, it calls one; told what the tool answered, or asked without tools, it says
``ANSWER``. What it says ends with the token that ends a turn. Planner, loop and what lies around
them are real; no model is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from minisgl_backend.config import EngineOptions
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.parts import Parts
from minisgl_backend.plan import SampledTokens, StepPlan
from minisgl_backend.request import EMPTY, IntArray, Request
from minisgl_backend.runtime import ports
from minisgl_backend.runtime.engine import Engine, EngineInfo
from minisgl_backend.scheduling.report import StepResult
from minisgl_backend.scheduling.scheduler import Scheduler
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.wire.generation import TextPrompt
from minisgl_bench.paced import paced_engine
from minisgl_kit.wrappers import SchedulerWrapper

WORDS: Final = "I will look it up."
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bogotá"}}\n</tool_call>'
ANSWER: Final = "It rains in Bogotá."
_END: Final = "<|im_end|>"
_TOOLS: Final = b"<tools>"
_TOLD: Final = b"\ntool\n"
"""How the template begins the turn of a tool, special tokens left out."""


class TritonPythonModel(llm_engine.TritonPythonModel):
    """What Triton loads in place of the shipped `llm_engine`."""

    @staticmethod
    def make_engine(options: EngineOptions) -> Engine:
        encoder = PromptEncoder.load(options.model)

        def ids(text: str) -> IntArray:
            return encoder.encode(TextPrompt(text, parse_special_tokens=True))

        def engine(
            info: EngineInfo,
            scheduler: ports.Scheduler,
            executor: ports.Executor,
            *,
            overlap: bool,
            grammars: Grammars | None = None,
        ) -> Engine:
            info = replace(info, eos_token_ids=tuple(ids(_END).tolist()))
            return Engine(info, scheduler, executor, overlap=overlap, grammars=grammars)

        parts = Parts(
            engine=engine,
            scheduler=lambda cache, config: _Agent(
                Scheduler(cache, config),
                pieces=encoder.vocabulary.pieces,
                calling=ids(f"{WORDS}\n{CALL}{_END}"),
                answering=ids(f"{ANSWER}{_END}"),
            ),
        )
        return paced_engine(options, step_s=0.002, parts=parts)


class _Agent(SchedulerWrapper):
    """A planner that is told other tokens than those sampled; only the engine's thread calls it."""

    def __init__(
        self,
        scheduler: ports.Scheduler,
        *,
        pieces: list[bytes],
        calling: IntArray,
        answering: IntArray,
    ) -> None:
        super().__init__(scheduler)
        self._pieces = pieces
        self._calling = calling
        self._answering = answering
        self._says: dict[int, IntArray] = {}
        """By request."""
        self._by_row: dict[int, tuple[IntArray, int]] = {}
        """What the request of a row says, and the length of its prompt."""

    def add(self, request: Request, generated: IntArray = EMPTY, num_scored: int = 0) -> None:
        text = b"".join(self._pieces[token] for token in request.prompt.tolist())
        calls = _TOOLS in text and _TOLD not in text
        self._says[request.id] = self._calling if calls else self._answering
        super().add(request, generated, num_scored)

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        for admission in plan.admissions if plan else ():
            says = self._says.pop(admission.request_id)
            self._by_row[admission.row] = (says, admission.num_prompt_tokens)
        return plan

    def commit(self, plan: StepPlan, tokens: SampledTokens) -> StepResult:
        last = plan.prefill_samples != 0
        ends = (plan.prefill_starts + plan.prefill_lengths)[last]
        positions = np.concatenate([ends, plan.decode_positions + 1])
        told = np.zeros(len(tokens.token_ids), np.int32)
        for index, (row, position) in enumerate(zip(plan.sample_rows, positions, strict=True)):
            says, num_prompt_tokens = self._by_row[int(row)]
            told[index] = says[(position - num_prompt_tokens) % len(says)]
        return super().commit(plan, SampledTokens(told))
