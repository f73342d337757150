"""The OpenAPI description tells the truth: schemathesis sends what it allows, and more."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.gateway.conftest import Gateway

pytestmark = pytest.mark.server

OPERATIONS = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/responses/input_tokens",
    "GET /v1/responses/{id}",
    "DELETE /v1/responses/{id}",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/embeddings",
    "POST /v1/rerank",
    "POST /v1/score",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ping",
    "GET /version",
    "GET /metrics",
)
FOR_OPERATORS = ("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter")
"""They need a separate key, which this gateway does not have."""
SHORT: dict[str, dict[str, Any]] = {
    "POST /v1/responses": {"max_output_tokens": 4},
    "POST /v1/responses/input_tokens": {},
    "POST /v1/messages": {"max_tokens": 4},
    "POST /v1/messages/count_tokens": {},
    "POST /v1/embeddings": {},
    "POST /v1/rerank": {},
    "POST /v1/score": {},
}
"""What keeps an answer short, if not ``max_tokens`` and ``n``."""
CONFIG = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": [400, 404, 405, 413, 415]}}}
)
"""The statuses of requests that the description does not allow; some are too large."""
BOUNDED = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def operations(gateway: Gateway) -> dict[str, Any]:
    """What the description offers, by method and path."""
    description = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json", config=CONFIG)
    results: list[Any] = list(description.get_all_operations())
    found = [result.ok() for result in results]
    return {operation.label: operation for operation in found}


def test_the_description_is_whole(operations: dict[str, Any]) -> None:
    assert set(operations) == {*OPERATIONS, *FOR_OPERATORS}


@pytest.mark.parametrize("label", OPERATIONS)
@pytest.mark.parametrize("allowed", [True, False])
def test_every_answer_is_one_that_is_described(
    operations: dict[str, Any], label: str, allowed: bool
) -> None:
    """Requests that the description allows, mostly for an existing model; and others."""
    mode = schemathesis.GenerationMode.POSITIVE if allowed else schemathesis.GenerationMode.NEGATIVE
    if not allowed and not label.startswith("POST"):
        mode = schemathesis.GenerationMode.POSITIVE

    @BOUNDED
    @given(case=operations[label].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if allowed and isinstance(case.body, dict):
            case.body.update({"model": "minisgl", **SHORT.get(label, {"max_tokens": 4, "n": 1})})
        # the engine has more rules than a schema can express: token ids, stop strings, lengths
        case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])

    ask()


def test_the_description_names_every_field(gateway: Gateway) -> None:
    schemas = gateway.get("/openapi.json").json()["components"]["schemas"]
    for name in ("messages", "tools", "max_completion_tokens", "cache_salt", "stream_options"):
        assert name in schemas["ChatCompletionRequest"]["properties"]
    assert "prompt" in schemas["CompletionRequest"]["properties"]
    assert "input" in schemas["ResponsesRequest"]["properties"]
    assert "schema" in schemas["JsonSchemaConfig"]["properties"]
    assert "system" in schemas["MessagesRequest"]["properties"]
    assert "error" in schemas["ErrorAnswer"]["properties"]
