"""Log-probabilities of prompts equal those of transformers: with OpenAI's ``echo`` and
``logprobs``, vLLM's ``prompt_logprobs``, and the requests of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import OpenAI
from openai.types import Completion, CompletionChoice
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl_backend.config import DEMO_MODEL
from tests.gateway.conftest import Gateway

pytestmark = pytest.mark.server

MODEL = "minisgl"
TEXTS = ["The capital of France is Paris.", "Hello", "日本語 is spoken in Japan. 🦊"]


class Reference:
    """The demo model in transformers."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self._model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def scores(self, ids: list[int]) -> torch.Tensor:
        """The log-probabilities after each token but the last, [num_tokens - 1, vocab_size]."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([ids])).logits[0, :-1]
        scores: torch.Tensor = logits.log_softmax(dim=-1)
        return scores

    def logprobs(self, ids: list[int]) -> list[float]:
        """The log-probabilities of all tokens but the first."""
        scores = self.scores(ids)
        found: list[float] = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return found


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def scored(choice: CompletionChoice) -> tuple[list[str], list[Any], list[Any], list[int]]:
    told = choice.logprobs
    assert told is not None
    lists = (told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset)
    for each in lists:
        assert each is not None and len(each) == len(told.tokens or ())
    return lists  # type: ignore[return-value]  # none is None


def assert_scored(choice: CompletionChoice, reference: Reference, ids: list[int]) -> None:
    """The prompt's tokens come first, with the scores that transformers gives."""
    tokens, logprobs, tops, offsets = scored(choice)
    assert logprobs[0] is None and tops[0] is None
    expected = reference.logprobs(ids)
    assert logprobs[1 : len(ids)] == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert tokens[: len(ids)] == [reference.tokenizer.decode([token]) for token in ids]
    for place, (row, token) in enumerate(zip(reference.scores(ids), ids[1:], strict=True), 1):
        is_greedy = int(row.argmax()) == token
        assert (max(tops[place].values()) == logprobs[place]) is is_greedy
        assert tokens[place] in tops[place]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for text, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in text and text != "<|endoftext|>":  # the latter is not in the answer
            assert choice.text[offset:].startswith(text)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs(
    client: OpenAI, reference: Reference, max_tokens: int, as_ids: bool
) -> None:
    """Texts and token ids, alone and in batches, cold and warm."""
    every_ids = [reference.ids(text) for text in TEXTS]
    batch: Any = every_ids if as_ids else TEXTS
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "echo": True, "logprobs": 1}
    for prompt in (batch, batch[0], batch):
        answer = client.completions.create(**asked, prompt=prompt, max_tokens=max_tokens)
        assert len(answer.choices) == (len(TEXTS) if prompt is batch else 1)
        for choice, text, ids in zip(answer.choices, TEXTS, every_ids, strict=False):
            assert_scored(choice, reference, ids)
            assert choice.text.startswith(text)
            tokens, *_ = scored(choice)
            assert len(ids) <= len(tokens) <= len(ids) + max_tokens
            if not max_tokens:
                assert (choice.text, choice.finish_reason) == (text, "length")
        num_tokens = sum(map(len, every_ids if prompt is batch else every_ids[:1]))
        assert answer.usage is not None and answer.usage.prompt_tokens == num_tokens


@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_streamed_echo_adds_up_to_the_whole_one(
    client: OpenAI, max_tokens: int, logprobs: int | None
) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": TEXTS[2] * 9,
        "temperature": 0,
        "echo": True,
        "logprobs": logprobs,
        "max_tokens": max_tokens,
    }
    whole = client.completions.create(**asked).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    assert parts[0].text.startswith(TEXTS[2] * 9)
    assert parts[-1].finish_reason == whole.finish_reason
    told = [part.logprobs.model_dump() for part in parts if part.logprobs is not None]
    if logprobs is None:
        assert told == [] and whole.logprobs is None
        return
    assert whole.logprobs is not None
    for name, values in whole.logprobs.model_dump().items():
        assert [value for each in told for value in each[name]] == values


def test_several_answers_to_an_echoed_prompt(client: OpenAI, reference: Reference) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=TEXTS[0], echo=True, logprobs=1, n=2, seed=1, max_tokens=2
    )
    for choice in answer.choices:
        assert_scored(choice, reference, reference.ids(TEXTS[0]))


def test_vllms_prompt_logprobs(client: OpenAI, reference: Reference) -> None:
    ids = reference.ids(TEXTS[0])
    extra = {"prompt_logprobs": 2}
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=0, extra_body=extra)
    choice: Any = answer.choices[0]
    assert choice.logprobs is None and choice.text == ""
    assert_vllms(choice.prompt_logprobs, reference, ids)
    message = {"role": "user", "content": "Hi"}
    chat: Any = client.chat.completions.create(
        model=MODEL,
        messages=[message],  # type: ignore[list-item]
        max_tokens=1,
        extra_body=extra,
    )
    made = reference.tokenizer.apply_chat_template([message], add_generation_prompt=True)
    assert_vllms(chat.prompt_logprobs, reference, list(getattr(made, "input_ids", made)))
    plain = client.completions.create(model=MODEL, prompt=ids, max_tokens=1)
    assert "prompt_logprobs" not in plain.choices[0].model_dump()


def assert_vllms(told: list[Any], reference: Reference, ids: list[int]) -> None:
    first, *others = told
    assert first is None
    for table, token, row in zip(others, ids[1:], reference.scores(ids), strict=True):
        assert next(iter(table)) == str(token)
        ranked = row.argsort(descending=True).tolist()
        assert set(table) == {str(one) for one in (token, *ranked[:2])}
        for one, entry in table.items():
            assert entry["logprob"] == pytest.approx(row[int(one)].item(), rel=1e-5, abs=1e-4)
            assert entry["rank"] == ranked.index(int(one)) + 1
            assert entry["decoded_token"] == reference.tokenizer.decode([int(one)])


def test_a_long_prompt_in_parts(client: OpenAI, reference: Reference) -> None:
    """It is longer than what a step computes at once or a packet holds."""
    ids = (reference.ids(TEXTS[0]) * 1000)[:6000]
    answer = client.completions.create(model=MODEL, prompt=ids, max_tokens=0, echo=True, logprobs=1)
    _, logprobs, _, _ = scored(answer.choices[0])
    assert logprobs[1:] == pytest.approx(reference.logprobs(ids), rel=1e-4, abs=1e-3)


def test_options_that_require_or_exclude_logprobs_of_the_prompt(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens must be >= 1 without echo"):
        client.completions.create(model=MODEL, prompt="Hi", max_tokens=0)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not supported with"):
        client.completions.create(
            model=MODEL, prompt="Hi", stream=True, extra_body={"prompt_logprobs": 1}
        )


def test_the_requests_of_lm_evaluation_harness(gateway: Gateway, reference: Reference) -> None:
    """What its model ``local-completions`` sends and how it reads the answers (0.4.13): the tokens
    after the context, without the generated one."""
    contexts = ["The capital of France is", "The capital of France is"]
    endings = [" Paris.", " Madrid."]
    pairs = [
        (reference.ids(context), reference.ids(context + ending))
        for context, ending in zip(contexts, endings, strict=True)
    ]
    texts = [context + ending for context, ending in zip(contexts, endings, strict=True)]
    for prompts in ([whole for _, whole in pairs], texts):
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompts,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        answer = gateway.post("/v1/completions", body).json()
        for choice, (context, whole) in zip(answer["choices"], pairs, strict=True):
            told = choice["logprobs"]["token_logprobs"][len(context) : -1]
            expected = reference.logprobs(whole)[len(context) - 1 :]
            assert sum(told) == pytest.approx(sum(expected), rel=1e-5, abs=1e-4)
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            is_greedy = all(one == max(top.values()) for one, top in zip(told, tops, strict=True))
            rows = reference.scores(whole)[len(context) - 1 :]
            assert is_greedy is (rows.argmax(dim=-1).tolist() == whole[len(context) :])
    body = {
        "prompt": pairs[0][0],
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n", "<|im_end|>"],
        "seed": 1234,
    }
    text = Completion.model_validate(gateway.post("/v1/completions", body).json()).choices[0].text
    assert text == " Paris"
