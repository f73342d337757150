"""LlamaIndex: structured answers by tools and by schemas, and agents."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from tests.gateway.sdks.cases import MODEL, QUESTION, Report, addresses, run, weather

AGENT, DEMO = addresses()
TOOL = FunctionTool.from_defaults(weather)


def _llm(url: str, **options: Any) -> Any:
    return OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        **options,
    )


def by_tools() -> Any:
    return _llm(DEMO).as_structured_llm(Report).chat([ChatMessage(QUESTION)]).raw


def by_schema() -> Any:
    llm = _llm(DEMO, should_use_structured_outputs=True)
    return llm.as_structured_llm(Report).chat([ChatMessage(QUESTION)]).raw


def by_schema_streamed() -> Any:
    llm = _llm(DEMO, should_use_structured_outputs=True)
    pieces = llm.as_structured_llm(Report).stream_chat([ChatMessage(QUESTION)])
    return list(pieces)[-1].raw


def predict_and_call() -> Any:
    return _llm(AGENT).predict_and_call([TOOL], QUESTION).response


def _agent(*, streaming: bool) -> Any:
    async def asked() -> Any:
        agent = FunctionAgent(tools=[TOOL], llm=_llm(AGENT), streaming=streaming)
        return await agent.run(QUESTION)

    output = asyncio.run(asked())
    return [output.response.content, [call.tool_kwargs for call in output.tool_calls]]


def agent() -> Any:
    return _agent(streaming=False)


def agent_streamed() -> Any:
    return _agent(streaming=True)


run(by_tools, by_schema, by_schema_streamed, predict_and_call, agent, agent_streamed)
