"""Whatever the schema, an answer that ends is valid, and every token was allowed.

The engine is a real one with random weights, so its answers mean nothing; eight requests with
different schemas are answered together, at temperature 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.grammar.guidance import TokenizerFacts
from minisgl_backend.request import FinishReason, Grammar, GrammarKind, SamplingParams
from minisgl_backend.text.detokenizer import TextStream
from minisgl_backend.text.tokenizer_files import load_definition, load_vocabulary
from tests.grammar.schemas import SCHEMAS
from tests.parallel.engines import Ranked, ranked_engine, wait_for_all
from tests.properties.effort import examples

# the warning about a failing example, which would hide the failure
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

VOCABULARY: Final = load_vocabulary(DEMO_MODEL)
TOGETHER: Final = 8
MOST_TOKENS: Final = 120


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "guessing"])
def ranked(request: pytest.FixtureRequest) -> Iterator[Ranked]:
    options: dict[str, Any] = {"dtype": "float32", "load_format": "dummy", "num_pages": 256}
    options["speculative_tokens"] = request.param
    with ranked_engine(1, Path(DEMO_MODEL), **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def facts(ranked: Ranked) -> TokenizerFacts:
    definition, special = load_definition(DEMO_MODEL)
    info = ranked.engine.info
    return TokenizerFacts(definition, info.vocab_size, info.eos_token_ids, special)


@settings(
    max_examples=examples(12),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    schemas=st.lists(SCHEMAS, min_size=TOGETHER, max_size=TOGETHER),
    seed=st.integers(0, 2**32),
)
def test_every_answer_is_valid(
    ranked: Ranked, facts: TokenizerFacts, schemas: list[dict[str, Any]], seed: int
) -> None:
    prompts = np.random.default_rng(seed).integers(10, 1900, (TOGETHER, 6)).astype(np.int32)
    answers = []
    for index, (prompt, schema) in enumerate(zip(prompts, schemas, strict=True)):
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        sampling = SamplingParams(max_tokens=MOST_TOKENS, seed=seed + index, grammar=grammar)
        answers.append(ranked.submit(prompt, sampling))
    wait_for_all(answers)
    tokenizer = facts.build()
    for answer, schema in zip(answers, schemas, strict=True):
        assert answer.error is None
        fresh = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        assert fresh.validate_tokens(answer.tokens) == len(answer.tokens)
        if answer.reason is FinishReason.LENGTH:
            assert len(answer.tokens) == MOST_TOKENS
            continue
        assert answer.reason is FinishReason.STOP
        text = TextStream(VOCABULARY).push(answer.tokens, final=True).text
        jsonschema.validate(json.loads(text), schema)
