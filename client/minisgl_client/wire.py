"""Names and data types of the ensembles' tensors, as tritonclient spells them.

Knows names only; the server decides what they mean and which values are allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

INPUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "text_input": "BYTES",
        "parse_special_tokens": "BOOL",
        "add_special_tokens": "BOOL",
        "messages": "BYTES",
        "tools": "BYTES",
        "chat_template_kwargs": "BYTES",
        "add_generation_prompt": "BOOL",
        "input_ids": "INT32",
        "sampling_parameters": "BYTES",
        "n": "INT32",
        "num_return_sequences": "INT32",
        "best_of": "INT32",
        "stream": "BOOL",
        "exclude_input_in_output": "BOOL",
        "skip_special_tokens": "BOOL",
        "max_tokens": "INT32",
        "max_new_tokens": "INT32",
        "fit_max_tokens": "BOOL",
        "min_tokens": "INT32",
        "min_length": "INT32",
        "temperature": "FP32",
        "top_p": "FP32",
        "top_k": "INT32",
        "min_p": "FP32",
        "repetition_penalty": "FP32",
        "presence_penalty": "FP32",
        "frequency_penalty": "FP32",
        "seed": "UINT64",
        "random_seed": "UINT64",
        "stop": "BYTES",
        "stop_words": "BYTES",
        "stop_token_ids": "INT32",
        "end_id": "INT32",
        "ignore_eos": "BOOL",
        "num_logprobs": "INT32",
        "num_prompt_logprobs": "INT32",
        "embed": "BOOL",
        "logit_bias": "BYTES",
        "structured_outputs": "BYTES",
        "guided_decoding_guide_type": "BYTES",
        "guided_decoding_guide": "BYTES",
        "priority_level": "INT32",
        "timeout_ms": "INT32",
        "cache_salt": "BYTES",
        "lora_name": "BYTES",
        "lora_task_id": "UINT64",
        "min_chunk_interval_ms": "INT32",
        "stop_request": "BOOL",
        "beam_width": "INT32",
        "length_penalty": "FP32",
        "bad_words": "BYTES",
        "pad_id": "INT32",
        "return_finish_reason": "BOOL",
        "return_stop_reason": "BOOL",
        "return_cumulative_logprob": "BOOL",
        "return_logprobs": "BOOL",
        "return_log_probs": "BOOL",
        "return_context_logits": "BOOL",
        "return_generation_logits": "BOOL",
        "return_kv_cache_reuse_stats": "BOOL",
        "return_num_input_tokens": "BOOL",
        "return_num_output_tokens": "BOOL",
        "return_num_cached_tokens": "BOOL",
        "return_perf_metrics": "BOOL",
    }
)
"""Data type by input; each has one element, except those in ``LISTS``."""

OUTPUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "text_output": "BYTES",
        "finish_reason": "BYTES",
        "stop_reason": "BYTES",
        "num_input_tokens": "UINT32",
        "num_output_tokens": "UINT32",
        "num_cached_tokens": "UINT32",
        "logprobs": "BYTES",
        "prompt_logprobs": "BYTES",
        "embedding": "FP32",
        "cumulative_logprob": "FP32",
        "cum_log_probs": "FP32",
        "output_log_probs": "FP32",
        "arrival_time_ns": "INT64",
        "first_scheduled_time_ns": "INT64",
        "first_token_time_ns": "INT64",
        "last_token_time_ns": "INT64",
    }
)
"""Data type by output; each has one element, or one per sample."""

TOKENIZER: Final = "tokenizer"
"""The model that knows the tokens; it may be called by itself."""
TOKENIZER_OUTPUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "input_ids": "INT32",
        "token_strs": "BYTES",
        "text": "BYTES",
        "max_sequence_length": "INT32",
        "chat_format": "BYTES",
    }
)
"""Data type by output of the tokenizer; its other outputs are for the engine."""

ENGINE: Final = "llm_engine"
"""The model that knows the LoRA adapters; only orders about these are sent to it."""
ADAPTER_ORDER: Final = "lora_order"
ADAPTER_LIST: Final = "lora_adapters"
"""The names of such an order and of its answer; both are JSON in a string."""

LISTS: Final = frozenset({"input_ids", "stop", "stop_words", "stop_token_ids", "bad_words"})
"""Inputs with any number of elements."""
