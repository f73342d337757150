"""Every parameter that the official clients can send is accepted, or known and refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params
from minisgl_gateway.completions.schema import ChatCompletionRequest, CompletionRequest
from minisgl_gateway.messages.schema import CountTokensRequest, MessagesRequest
from minisgl_gateway.responses.schema import InputTokensRequest, ResponsesRequest
from minisgl_gateway.retrieval_schema import EmbeddingRequest
from minisgl_gateway.strict_schema import Body
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (ChatCompletionRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (InputTokensRequest, input_token_count_params.InputTokenCountParams),
        (MessagesRequest, message_create_params.MessageCreateParamsBase),
        (MessagesRequest, beta_create_params.MessageCreateParamsBase),
        (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
        (CountTokensRequest, beta_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_parameters_of_the_official_clients_are_known(kind: type[Body], parameters: Any) -> None:
    names = parameters.__required_keys__ | parameters.__optional_keys__
    assert "model" in names
    assert names - kind.model_fields.keys() - kind.not_offered.keys() == set()
