"""The official client of OpenAI's API against the gateway and the demo model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk

from tests.gateway.conftest import Gateway

pytestmark = pytest.mark.server

MODEL = "minisgl"
FRANCE = "What is the capital of France?"
NUMBERS = "List the Chinese numbers."
MAX_WORDS = "Count from 1 to 10."


def asked(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **fields}


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def streamed(client: OpenAI, content: str, **fields: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(**asked(content, stream=True, **fields)) as stream:
        return list(stream)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        choice.delta.content or ""
        for chunk in chunks
        for choice in chunk.choices
        if choice.index == index
    )


def test_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asked(FRANCE))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Paris")
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


@pytest.mark.parametrize("question", [FRANCE, NUMBERS, "Write a poem about the sea."])
def test_a_stream_says_what_a_whole_answer_says(client: OpenAI, question: str) -> None:
    whole = client.chat.completions.create(**asked(question))
    chunks = streamed(client, question, stream_options={"include_usage": True})
    assert text_of(chunks) == whole.choices[0].message.content
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "stop"
    ]
    *others, last = chunks
    assert not last.choices
    assert all(chunk.usage is None for chunk in others)
    assert whole.usage is not None and last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_prefix_cache_shows_in_the_usage(client: OpenAI) -> None:
    long = "The code of Anna is 4711. " * 20 + "What is the code of Anna?"
    for _ in range(2):
        answer = client.chat.completions.create(**asked(long))
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and cached > answer.usage.prompt_tokens // 2
    answer = client.chat.completions.create(**asked(long), extra_body={"cache_salt": "other"})
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_conversation_goes_on_with_the_answers_that_came(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": FRANCE}]
    first = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    messages += [first.choices[0].message, {"role": "user", "content": "What is 7 plus 8?"}]
    second = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert second.choices[0].message.content == "15"


def test_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=FRANCE, temperature=0)
    assert answer.choices[0].text.strip() == "Paris"
    assert answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(model=MODEL, prompt=FRANCE, temperature=0, stream=True)
    chunks: list[Completion] = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_several_prompts_and_choices(client: OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=[FRANCE, "What is 7 plus 8?"], n=2, temperature=0
    )
    assert [choice.text.strip() for choice in answer.choices] == ["Paris", "Paris", "15", "15"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_choices_of_a_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(**asked(NUMBERS, n=3))
    chunks = streamed(client, NUMBERS, n=3, stream_options={"include_usage": True})
    texts = [text_of(chunks, index) for index in range(3)]
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_samples_of_one_request(client: OpenAI, gateway: Gateway, stream: bool) -> None:
    """Each is what a request with its seed gets; the prompt is computed and counted once."""
    prompt = f"{'Two foxes' if stream else 'A dog'}: tell me {'a long ' * 30}story about them."
    fields: dict[str, Any] = {"max_tokens": 12, "extra_body": {"ignore_eos": True}}
    hot = {**asked(prompt, **fields), "temperature": 1.8}
    if stream:
        chunks: list[ChatCompletionChunk] = list(
            client.chat.completions.create(
                **hot, seed=40, n=4, stream=True, stream_options={"include_usage": True}
            )
        )
        texts: list[str | None] = [text_of(chunks, index) for index in range(4)]
        ends = [c.choices[0].index for c in chunks if c.choices and c.choices[0].finish_reason]
        assert sorted(ends) == [0, 1, 2, 3]
        used = chunks[-1].usage
    else:
        answer = client.chat.completions.create(**hot, seed=40, n=4)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        texts = [choice.message.content for choice in answer.choices]
        used = answer.usage
    assert used is not None and used.completion_tokens == 48
    assert used.prompt_tokens_details is not None
    assert (used.prompt_tokens_details.cached_tokens or 0) <= 16, "what all chats begin with"
    own = [client.chat.completions.create(**hot, seed=40 + sample) for sample in range(4)]
    assert texts == [each.choices[0].message.content for each in own]
    assert own[0].usage is not None and own[0].usage.prompt_tokens == used.prompt_tokens
    assert len(set(texts)) == 4


def test_the_best_of_several_completions(client: OpenAI) -> None:
    hot: dict[str, Any] = {
        "model": MODEL,
        "prompt": FRANCE,
        "temperature": 1.8,
        "seed": 5,
        "max_tokens": 10,
        "logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }
    every = client.completions.create(**hot, n=6).choices
    best = client.completions.create(**hot, n=2, best_of=6)

    def likelihood(choice: CompletionChoice) -> float:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        return sum(choice.logprobs.token_logprobs)

    ranked = sorted(every, key=likelihood, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None and best.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match="best_of must be n, 2, with stream"):
        client.completions.create(**hot, n=2, best_of=6, stream=True)


def test_one_seed_makes_one_answer(client: OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            **{**asked("Tell me a story about a fox.", seed=seed, n=4), "temperature": 1.9}
        )
        return [choice.message.content for choice in answer.choices]

    first = texts(7)
    assert texts(7) == first
    assert len(set(first)) > 1
    assert texts(-8) != first


def test_token_ids_as_a_prompt_and_echo(client: OpenAI) -> None:
    by_ids = client.completions.create(model=MODEL, prompt=[40, 41, 42], max_tokens=2)
    assert by_ids.usage is not None and by_ids.usage.prompt_tokens == 3
    for stream in (False, True):
        answer = client.completions.create(
            model=MODEL, prompt=FRANCE, temperature=0, echo=True, stream=stream
        )
        parts = [answer] if isinstance(answer, Completion) else list(answer)
        text = "".join(part.choices[0].text for part in parts)
        assert text.startswith(FRANCE) and text.endswith("Paris")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"max_tokens": 3}, "length"), ({"stop": ["5"]}, "stop"), ({"stop": "5"}, "stop")],
)
def test_finish_reasons(client: OpenAI, fields: dict[str, Any], reason: str) -> None:
    choice = client.chat.completions.create(**asked(MAX_WORDS, **fields)).choices[0]
    assert choice.finish_reason == reason
    assert "5" not in (choice.message.content or "")
    chunks = streamed(client, MAX_WORDS, **fields)
    assert chunks[-1].choices[0].finish_reason == reason
    assert text_of(chunks) == choice.message.content


def test_extra_parameters_of_vllm(client: OpenAI) -> None:
    extra = {
        "top_k": 1,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "min_tokens": 8,
        "ignore_eos": True,
        "stop_token_ids": [0],
        "priority": 1,
        "cache_salt": "mine",
    }
    answer = client.chat.completions.create(**asked(FRANCE, max_tokens=8), extra_body=extra)
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"


def test_the_stop_string_that_matched_ends_the_text_if_it_is_asked_for(client: OpenAI) -> None:
    extra = {"include_stop_str_in_output": True}
    chat = asked(MAX_WORDS, stop=["nothing", "5"])
    whole = client.chat.completions.create(**chat, extra_body=extra).choices[0].message.content
    without = client.chat.completions.create(**chat).choices[0].message.content
    assert whole == f"{without}5"
    assert text_of(streamed(client, MAX_WORDS, stop="5", extra_body=extra)) == whole
    completion: dict[str, Any] = {"model": MODEL, "prompt": FRANCE, "temperature": 0, "stop": "ri"}
    assert client.completions.create(**completion, extra_body=extra).choices[0].text == " Pari"
    parts = client.completions.create(**completion, extra_body=extra, stream=True)
    assert "".join(part.choices[0].text for part in parts) == " Pari"


def test_special_tokens_are_shown_if_it_is_asked_for(client: OpenAI) -> None:
    forced: dict[str, Any] = {"max_tokens": 2, "logit_bias": {"1": 100}}
    for skips, text in ((True, ""), (False, "<|im_start|>" * 2)):
        extra = {"skip_special_tokens": skips}
        completion = client.completions.create(model=MODEL, prompt="x", **forced, extra_body=extra)
        assert completion.choices[0].text == text
        chat = client.chat.completions.create(**asked(FRANCE, **forced), extra_body=extra)
        assert chat.choices[0].message.content == text


def test_ids_of_tokens(client: OpenAI) -> None:
    """As in vLLM, whose fields the client keeps."""
    extra = {"return_token_ids": True}
    whole: Any = client.chat.completions.create(**asked(FRANCE), extra_body=extra)
    scored: Any = client.chat.completions.create(**asked(FRANCE, logprobs=True), extra_body=extra)
    assert whole.choices[0].logprobs is None
    assert whole.choices[0].token_ids == scored.choices[0].token_ids
    assert len(scored.choices[0].logprobs.content) == len(whole.choices[0].token_ids) == 4
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    chunks: Any = streamed(client, FRANCE, extra_body=extra)
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in chunks[1:])
    choices = [choice for chunk in chunks for choice in chunk.choices]
    parts = [getattr(choice, "token_ids", []) for choice in choices]
    assert [one for part in parts for one in part] == whole.choices[0].token_ids

    completion: dict[str, Any] = {"model": MODEL, "prompt": [[40, 41], [42]], "temperature": 0}
    answer: Any = client.completions.create(**completion, extra_body=extra)
    assert [choice.prompt_token_ids for choice in answer.choices] == [[40, 41], [42]]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert sum(len(one.token_ids) for one in answer.choices) == answer.usage.completion_tokens
    streams: Any = client.completions.create(**completion, extra_body=extra, stream=True)
    ids: dict[int, list[int]] = {0: [], 1: []}
    prompts: dict[int, list[int]] = {}
    for chunk in streams:
        (choice,) = chunk.choices
        ids[choice.index] += choice.token_ids
        if hasattr(choice, "prompt_token_ids"):
            assert choice.index not in prompts
            prompts[choice.index] = choice.prompt_token_ids
    assert prompts == {0: [40, 41], 1: [42]}
    assert [ids[one.index] for one in answer.choices] == [one.token_ids for one in answer.choices]
    of_text: Any = client.completions.create(model=MODEL, prompt="Hi there", extra_body=extra)
    assert len(of_text.choices[0].prompt_token_ids) == of_text.usage.prompt_tokens
    plain: Any = client.completions.create(model=MODEL, prompt="Hi there")
    assert not hasattr(plain.choices[0], "token_ids")


def test_logprobs_of_a_chat(client: OpenAI) -> None:
    fields = {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked(FRANCE, **fields)).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    tokens = whole.logprobs.content
    assert "".join(token.token for token in tokens) == "Paris<|im_end|>"
    for token in tokens:
        assert bytes(token.bytes or ()).decode() == token.token
        assert token.top_logprobs[0].token == token.token  # greedy
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1.0001
    parts = [
        token
        for chunk in streamed(client, FRANCE, **fields)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert [part.token for part in parts] == [token.token for token in tokens]
    assert [len(part.top_logprobs) for part in parts] == [3] * len(tokens)


def test_halves_of_characters_have_their_bytes(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asked("What is the emoji for a fox?", logprobs=True))
    assert answer.choices[0].message.content == "🦊"
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content or []
    assert any("\ufffd" in token.token for token in tokens)
    assert b"".join(bytes(token.bytes or ()) for token in tokens).startswith("🦊".encode())


def test_offsets_of_tokens_are_those_of_the_text(client: OpenAI) -> None:
    prompt = "The 🦊 eats 寿司 and crème brûlée 🥑🥑."
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=8, temperature=0, echo=True, logprobs=0
    )
    (choice,) = answer.choices
    told = choice.logprobs
    assert told is not None and told.tokens and told.text_offset
    assert any("\ufffd" in token for token in told.tokens)
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        if "\ufffd" not in token and not token.startswith("<|"):
            assert choice.text[offset:].startswith(token)


def test_logprobs_of_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=FRANCE, temperature=0, logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens and told.token_logprobs and told.text_offset and told.top_logprobs
    assert told.text_offset[:2] == [0, len(told.tokens[0])]
    assert all(len(top) == 2 for top in told.top_logprobs)
    stream = client.completions.create(
        model=MODEL, prompt=FRANCE, temperature=0, logprobs=2, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in stream]
    offsets = [o for part in parts if part is not None for o in part.text_offset or ()]
    assert offsets == told.text_offset


async def test_many_at_a_time(gateway: Gateway) -> None:
    names = {"France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo"}
    countries = list(names) * 8

    async def ask(country: str) -> str:
        question = f"What is the capital of {country}?"
        stream = await opened.chat.completions.create(**asked(question, stream=True))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return "".join(pieces)

    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="any") as opened:
        answers = await asyncio.gather(*map(ask, countries))
    assert answers == [names[country] for country in countries]


def test_what_the_sdk_has_parsed_can_be_sent_back(client: OpenAI) -> None:
    """It contains the SDK's own fields."""
    parsed = client.chat.completions.parse(**asked(FRANCE)).choices[0].message
    with client.chat.completions.stream(**asked(FRANCE)) as stream:
        gathered = stream.get_final_completion().choices[0].message
    for message in (parsed, gathered):
        assert "parsed" in message.model_dump()
        history = [*asked(FRANCE)["messages"], message, {"role": "user", "content": NUMBERS}]
        answer = client.chat.completions.create(**{**asked(""), "messages": history})
        assert answer.choices[0].message.content


def test_usage_so_far_in_every_chunk(client: OpenAI) -> None:
    whole = client.chat.completions.create(**asked(MAX_WORDS)).usage
    assert whole is not None
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(client, MAX_WORDS, stream_options=options)
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == len(chunks)
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] >= 1 and counts[-2] == counts[-1] == whole.completion_tokens
    assert {usage.prompt_tokens for usage in usages} == {whole.prompt_tokens}


def test_what_has_no_effect_is_taken_and_said(client: OpenAI) -> None:
    answer = client.chat.completions.with_raw_response.create(
        **asked(FRANCE, store=True, reasoning_effort="low", metadata={"a": "b"}, verbosity="low"),
        extra_headers={"X-Request-Id": "mine"},
    )
    said = answer.headers["X-Minisgl-Without-Effect"]
    assert said == "metadata, reasoning_effort, store, verbosity"
    assert answer.headers["X-Request-Id"] == answer.parse()._request_id == "mine"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def test_errors_are_those_that_the_client_knows(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked(FRANCE), "model": "gpt-5"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(FRANCE), extra_body={"temprature": 1})
    assert "temperature" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked(FRANCE, max_tokens=10_000))
    assert "8192" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        streamed(client, FRANCE, stop=["x" * 5000])
    assert "stop" in caught.value.message
