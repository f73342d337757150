"""What a caller is told about the engine's errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from minisgl_client.errors import Closed, error_from
from minisgl_gateway.engine_errors import _LOST, _ONLY_EMBEDS, api_error

from minisgl_backend.errors import EngineFailure, InvalidRequest, Unsupported
from minisgl_backend.request import Grammar, GrammarKind, Request, RequestId, SamplingParams
from minisgl_backend.runtime.capacity import Capacity
from minisgl_backend.runtime.constraints import Compiled, Constraints
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire.generation import TextPrompt

BACKEND = Path(__file__).parents[2] / "minisgl_backend"


@pytest.mark.parametrize(
    "sentence",
    [
        *(f"{EngineFailure.code}: {text}" for text in sorted(_LOST)),
        "Stub process 'llm_engine_0_0' is not healthy.",
        "[request id: <id_unknown>] Server is stopping, scheduler for model has stopped accepting"
        " new inference requests",
    ],
)
def test_a_request_that_a_process_lost_or_refused_may_come_again(sentence: str) -> None:
    error = api_error(error_from(f"in ensemble 'minisgl', {sentence}"), ())
    assert (error.status, error.code) == (503, "engine_unavailable")
    assert error.headers == {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("sentence", "message"),
    [
        ("Stub process 'tokenizer_0_0' is not healthy.", "a process of the engine has died"),
        ("[request id: 1] Server is stopping, scheduler for model", "the server is shutting down"),
    ],
)
def test_callers_do_not_know_the_processes_of_triton(sentence: str, message: str) -> None:
    told = f"in ensemble 'minisgl', {sentence}"
    assert api_error(error_from(told), ()).message == message


def test_the_engine_speaks_so() -> None:
    sources = [path.read_text("utf-8") for path in BACKEND.rglob("*.py")]
    known = _LOST | _ONLY_EMBEDS
    assert [text for text in known if not any(f'"{text}"' in source for source in sources)] == []


@pytest.mark.parametrize("sentence", sorted(_ONLY_EMBEDS))
def test_a_model_that_only_embeds_names_the_route_for_it(sentence: str) -> None:
    """No route takes ``embed``."""
    error = api_error(error_from(f"in ensemble 'minisgl', INVALID_ARG: {sentence}"), ())
    assert (error.status, error.code) == (400, "unsupported_parameter")
    assert error.message == "the model only makes embeddings, for /v1/embeddings"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_pages", "words"),
    [
        (5000, 1, 10_000, "4096 tokens. However, your messages resulted in 5000 tokens. Please"),
        (
            4096,
            1,
            10_000,
            "4096 tokens. However, your messages resulted in 4096 tokens, and the answer needs one "
            "more token",
        ),
        (
            4000,
            100,
            10_000,
            "4096 tokens. However, you requested 4100 tokens (4000 in the messages, 100 in the ",
        ),
        (
            300,
            200,
            25,
            "401 tokens. However, you requested 500 tokens (300 in the messages, 200 in the ",
        ),
    ],
)
def test_what_exceeds_the_context_is_said_as_openai_says_it(
    num_prompt: int, max_tokens: int, num_pages: int, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        capacity = Capacity(max_sequence_length=4096, num_pages=num_pages, page_size=16)
        capacity.check(num_prompt_tokens=num_prompt, max_tokens=max_tokens)
    sentence = f"{InvalidRequest.code}: {refusal.value}"
    error = api_error(error_from(sentence), ("messages", "max_tokens"))
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.message.startswith("This model's maximum context length is ")
    assert words in error.message
    assert error.param == ("max_tokens" if num_prompt < 4096 else "messages")


def test_too_many_tokens_are_refused_in_the_words_that_claude_code_reads() -> None:
    """Then it asks for fewer."""
    with pytest.raises(InvalidRequest) as refusal:
        capacity = Capacity(max_sequence_length=4096, num_pages=25, page_size=16)
        capacity.check(num_prompt_tokens=300, max_tokens=200)
    error = api_error(error_from(f"{InvalidRequest.code}: {refusal.value}"), ("max_tokens",))
    message = error.anthropic_body("req_1")["error"]["message"]
    assert message.startswith(
        "input length and `max_tokens` exceed context limit: 300 + 200 > 401, decrease "
    )


@pytest.mark.parametrize("text", ["word " * 1000, "w" * 10_000])
@pytest.mark.parametrize("context", [100, 8192])
def test_a_text_that_is_seen_to_be_too_long_without_tokenizing_it(text: str, context: int) -> None:
    """For the context, or for the pages."""
    encoder = PromptEncoder.load(BACKEND / "demo_model", context=context)
    with pytest.raises(InvalidRequest) as refusal:
        encoder.encode(TextPrompt(text), most_tokens=100)
    error = api_error(error_from(f"{InvalidRequest.code}: {refusal.value}"), ("prompt",))
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert error.message.startswith("This model's maximum context length is 100 tokens. However, ")


def test_the_field_that_asked_for_a_grammar_is_named_if_the_engine_takes_none() -> None:
    constraints = Constraints(None)
    told: list[Compiled] = []
    sampling = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a"))
    prompt = np.array([1], dtype=np.int32)
    request = Request(id=RequestId(1), prompt=prompt, sampling=sampling)
    constraints.compile(request, told.append)
    refusal = constraints.compiled(told[0])
    sentence = f"{Unsupported.code}: {refusal}"
    error = api_error(error_from(sentence), (), of_form=lambda message: ("regex", message))
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", "regex")
    assert error.message.startswith("regex: ")


def test_other_wrong_values_are_not_about_the_context() -> None:
    error = api_error(error_from(f"{InvalidRequest.code}: max_tokens must be >= 1, got 0"), ())
    assert error.code == "invalid_value"


def test_a_client_that_is_closed_means_that_the_gateway_ends() -> None:
    error = api_error(Closed("the client was closed"), ())
    assert (error.status, error.code) == (503, "shutting_down")


def test_other_failures_of_the_engine_are_bugs() -> None:
    error = api_error(error_from(f"{EngineFailure.code}: a step breaks with this request"), ())
    assert (error.status, error.message) == (500, "internal error")
