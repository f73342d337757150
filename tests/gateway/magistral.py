"""An engine that thinks, speaks and calls a tool, as a trained Mistral model would.

Planner, loop and everything around them are real; no model is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from minisgl_backend.config import EngineOptions
from minisgl_backend.grammar.matchers import Grammars
from minisgl_backend.parts import Parts
from minisgl_backend.runtime import ports
from minisgl_backend.runtime.adapters import Adapters
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.tritonserver import llm_engine
from minisgl_backend.wire.generation import TextPrompt
from minisgl_bench.paced import paced_engine

MARKS: Final = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
THOUGHT: Final = "Bogotá is wet.\n\nBut today?"
WORDS: Final = "I will look it up."
ARGUMENTS: Final = '{"city": "Bogotá"}'
_END: Final = "<|im_end|>"
_SAID: Final = f"[THINK]\n{THOUGHT}\n[/THINK]\n\n{WORDS}[TOOL_CALLS]weather[ARGS]{ARGUMENTS}{_END}"


def scripted_model(said: str, *, end: str) -> type[llm_engine.TritonPythonModel]:
    """What Triton loads in place of the shipped `llm_engine`: it says ``said`` to any prompt, up to
    the token ``end``."""

    class ScriptedModel(llm_engine.TritonPythonModel):
        @staticmethod
        def make_engine(options: EngineOptions) -> Engine:
            prompt = TextPrompt(end, parse_special_tokens=True)
            ends = tuple(PromptEncoder.load(options.model).encode(prompt).tolist())

            def engine(
                info: EngineInfo,
                scheduler: ports.Scheduler,
                executor: ports.Executor,
                *,
                overlap: bool,
                grammars: Grammars | None = None,
                adapters: Adapters | None = None,
            ) -> Engine:
                info = replace(info, eos_token_ids=ends)
                return Engine(
                    info, scheduler, executor, overlap=overlap, grammars=grammars, adapters=adapters
                )

            return paced_engine(options, step_s=0.002, text=said, parts=Parts(engine=engine))

    return ScriptedModel


TritonPythonModel = scripted_model(_SAID, end=_END)
