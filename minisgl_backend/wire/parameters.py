"""The one table of every name on the wire, from which all the rest is derived.

``INPUTS`` lists what a request may give and ``OUTPUTS`` what an answer may hold. Parsing, the
suggestions for unknown names, the client's names and the documentation follow this table, and a
contract test compares it with the ``config.pbtxt`` files. It knows defaults and ranges; ``parse``
has the rules about several values.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from minisgl_backend.request import MAX_SAMPLES
from minisgl_backend.wire.entries import Input, Kind, Output, Tensor


def _flag(name: str, meaning: str, *, default: bool = False, **more: Any) -> Input:
    return Input(name=name, kind=Kind.FLAG, meaning=meaning, default=default, **more)


def _integer(name: str, meaning: str, **more: Any) -> Input:
    return Input(name=name, kind=Kind.INTEGER, meaning=meaning, **more)


def _number(name: str, meaning: str, default: float, **more: Any) -> Input:
    return Input(name=name, kind=Kind.NUMBER, meaning=meaning, default=default, **more)


def _text(name: str, meaning: str, **more: Any) -> Input:
    return Input(name=name, kind=Kind.TEXT, meaning=meaning, **more)


INPUTS: Final[tuple[Input, ...]] = (
    _text("text_input", "the prompt as it is", top_level=True, text_only=True),
    _flag(
        "parse_special_tokens",
        "special-token text in text_input becomes control tokens",
        top_level=True,
        text_only=True,
    ),
    _flag(
        "add_special_tokens",
        "text_input gets the special tokens that the tokenizer puts around a text",
        default=True,
        top_level=True,
        text_only=True,
    ),
    _text(
        "messages",
        "a JSON list of chat messages; the model's chat template is applied. Special-token text in "
        "them becomes control tokens",
        top_level=True,
        text_only=True,
    ),
    _text("tools", "a JSON list of tools for the template", top_level=True, text_only=True),
    _text(
        "chat_template_kwargs",
        "a JSON object of variables for the template, such as enable_thinking; not those that "
        "every template gets, such as messages",
        top_level=True,
        text_only=True,
    ),
    _flag(
        "add_generation_prompt",
        "the text that the template makes of messages ends with the beginning of an answer",
        default=True,
        top_level=True,
        text_only=True,
    ),
    Input(name="input_ids", kind=Kind.INTEGERS, meaning="the prompt as token ids", top_level=True),
    _text("sampling_parameters", "a JSON object of the parameters below", top_level=True),
    _integer(
        "n",
        "number of answers (samples), 1 .. 64, each an element of the outputs; sample i has the "
        "seed seed + i, modulo 2**64",
        synonyms=("num_return_sequences",),
        default=1,
        minimum=1,
        maximum=MAX_SAMPLES,
    ),
    _integer(
        "best_of",
        "number of samples to generate, n .. 64, of which the n with the highest "
        "cumulative_logprob are returned, the highest first, those that a deadline cut last. "
        "Default: n; more than n is refused with stream",
        minimum=1,
        maximum=MAX_SAMPLES,
    ),
    _flag("stream", "false: exactly one response; true: one whenever there is new text"),
    _flag(
        "exclude_input_in_output",
        "false: the text starts with the prompt; refused with stream or messages",
        default=True,
        text_only=True,
    ),
    _flag(
        "skip_special_tokens",
        "false: special tokens appear in the text, except those that end the request",
        default=True,
        text_only=True,
    ),
    _integer(
        "max_tokens",
        "most tokens to generate, 1 .. context - prompt; may be 0 with num_prompt_logprobs: then "
        "only the prompt is computed; must be 0 with embed",
        synonyms=("max_new_tokens",),
        default=16,
        minimum=0,
    ),
    _flag(
        "fit_max_tokens",
        "lower max_tokens to what the context and the KV pages have room for; true if max_tokens "
        "is absent",
    ),
    _integer(
        "min_tokens",
        "no end of sequence and no stop match before this number of tokens",
        synonyms=("min_length",),
        default=0,
        minimum=0,
    ),
    _number("temperature", "0 is greedy", 1.0, minimum=0),
    _number("top_p", "0 or 1 is off", 1.0, minimum=0, maximum=1),
    _integer("top_k", "0 or -1 is off", default=0, minimum=-1),
    _number("min_p", "0 is off", 0.0, minimum=0, maximum=1),
    _number("repetition_penalty", "1 is off; divides or multiplies logits", 1.0, above=0),
    _number("presence_penalty", "0 is off", 0.0, minimum=-2, maximum=2),
    _number("frequency_penalty", "0 is off", 0.0, minimum=-2, maximum=2),
    Input(
        name="seed",
        kind=Kind.SEED,
        meaning="seed of the random numbers; on a CPU in float32 the same seed gives the same "
        "answer; drawn if absent",
        synonyms=("random_seed",),
        minimum=0,
        maximum=2**64 - 1,
    ),
    Input(
        name="stop",
        kind=Kind.TEXTS,
        meaning="stop strings, matched in the text and cut off from it",
        synonyms=("stop_words",),
        default=(),
        text_only=True,
    ),
    Input(
        name="stop_token_ids",
        kind=Kind.INTEGERS,
        meaning="added to the model's own set",
        single_synonyms=("end_id",),
        default=(),
        minimum=0,
    ),
    _flag("ignore_eos", "the model's end of sequence does not end the request"),
    _integer(
        "num_logprobs",
        "alternatives per token in logprobs, 0 .. 20; does not ask for logprobs by itself",
        parameter_synonyms=("logprobs", "top_logprobs"),
        minimum=0,
    ),
    _integer(
        "num_prompt_logprobs",
        "asks for prompt_logprobs with this number of alternatives per token, 0 .. 20; the prompt "
        "is then computed without the prefix cache",
        parameter_synonyms=("prompt_logprobs",),
        minimum=0,
    ),
    _flag(
        "embed",
        "ask for embedding, the hidden state of the prompt's last token; nothing is generated",
    ),
    Input(name="logit_bias", kind=Kind.BIASES, meaning="JSON {token id: bias}", default=()),
    Input(
        name="structured_outputs",
        kind=Kind.JSON,
        meaning="the form of the answer, a JSON object with one of json (a schema), json_object, "
        "regex, choice, grammar and structural_tag; as parameters also guided_json, guided_regex, "
        "guided_choice, guided_grammar and guided_decoding",
    ),
    _text(
        "guided_decoding_guide_type",
        "the same under the names of the TensorRT-LLM backend: json (any object or list), "
        "json_schema, regex or ebnf_grammar",
    ),
    _text("guided_decoding_guide", "the schema, expression or grammar of that type"),
    _integer("priority_level", "higher first", default=0),
    _integer(
        "timeout_ms",
        "deadline for the whole request; so is Triton's own parameter timeout, in µs",
        minimum=1,
    ),
    _text(
        "cache_salt",
        "only requests with the same salt share cached prefixes; at most 64 of A-Z, a-z, 0-9, _ "
        "and -",
        default="",
    ),
    _text("lora_name", "the name of the LoRA adapter to answer with"),
    Input(
        name="lora_task_id",
        kind=Kind.SEED,
        meaning="the same by its number in the option lora_task_ids, for tensorrtllm clients",
        minimum=0,
        maximum=2**64 - 1,
    ),
    _integer("min_chunk_interval_ms", "the least time in ms between two responses", minimum=0),
    _flag("stop_request", "cancel all live requests that have this request id"),
    _integer("beam_width", "1; declared for tensorrtllm clients", default=1),
    _number("length_penalty", "1; declared for tensorrtllm clients", 1.0),
    Input(
        name="bad_words",
        kind=Kind.TEXTS,
        meaning="none; declared for tensorrtllm clients",
        default=(),
        text_only=True,
    ),
    _integer("pad_id", "no effect; declared for tensorrtllm clients"),
    _flag("return_finish_reason", "ask for finish_reason"),
    _flag("return_stop_reason", "ask for stop_reason"),
    _flag("return_cumulative_logprob", "ask for cumulative_logprob"),
    _flag("return_logprobs", "ask for logprobs"),
    _flag("return_log_probs", "ask for cum_log_probs and output_log_probs"),
    _flag("return_context_logits", "false; declared for tensorrtllm clients"),
    _flag("return_generation_logits", "false; declared for tensorrtllm clients"),
    _flag("return_kv_cache_reuse_stats", "false; declared for tensorrtllm clients"),
    _flag("return_num_input_tokens", "ask for num_input_tokens"),
    _flag("return_num_output_tokens", "ask for num_output_tokens"),
    _flag("return_num_cached_tokens", "ask for num_cached_tokens"),
    _flag("return_perf_metrics", "ask for the times"),
)

OUTPUTS: Final[tuple[Output, ...]] = (
    Output(
        name="text_output",
        kind=Kind.TEXT,
        meaning="the delta (stream) or the whole text; never half a character",
        text_only=True,
        each=True,
    ),
    Output(
        name="finish_reason",
        kind=Kind.TEXT,
        meaning="None while running, then stop, length, cancelled or timeout",
        asked_by=("return_finish_reason",),
        each=True,
    ),
    Output(
        name="stop_reason",
        kind=Kind.TEXT,
        meaning="the stop string or token id that matched, as JSON; else null",
        asked_by=("return_stop_reason",),
        each=True,
    ),
    Output(
        name="num_input_tokens",
        kind=Kind.COUNT,
        meaning="tokens of the prompt",
        asked_by=("return_num_input_tokens",),
    ),
    Output(
        name="num_output_tokens",
        kind=Kind.COUNT,
        meaning="tokens of this response; they add up to the total",
        asked_by=("return_num_output_tokens",),
        each=True,
    ),
    Output(
        name="num_cached_tokens",
        kind=Kind.COUNT,
        meaning="prompt tokens taken from the prefix cache",
        asked_by=("return_num_cached_tokens",),
    ),
    Output(
        name="logprobs",
        kind=Kind.TEXT,
        meaning="JSON list, one object per token: {token id: {logprob, rank, decoded_token}}, the "
        "chosen token first, with bytes if decoded_token holds U+FFFD, as parts of characters do; "
        "null without num_logprobs",
        asked_by=("return_logprobs",),
        each=True,
    ),
    Output(
        name="prompt_logprobs",
        kind=Kind.TEXT,
        meaning="the same for the prompt's tokens, each given those before it; null for the first. "
        "With stream they come before the text, in parts to be joined",
        asked_by=("num_prompt_logprobs",),
    ),
    Output(
        name="embedding",
        kind=Kind.NUMBERS,
        meaning="the hidden state of the prompt's last token after the final norm, normalized to "
        "length 1: hidden_size numbers, in the last response",
        asked_by=("embed",),
    ),
    Output(
        name="cumulative_logprob",
        kind=Kind.NUMBER,
        meaning="sum over the chosen tokens so far",
        asked_by=("return_cumulative_logprob",),
        each=True,
    ),
    Output(
        name="cum_log_probs",
        kind=Kind.NUMBER,
        meaning="the same under the name of the TensorRT-LLM backend",
        asked_by=("return_log_probs",),
        each=True,
    ),
    Output(
        name="output_log_probs",
        kind=Kind.NUMBER_ROWS,
        meaning="logprobs of this response's chosen tokens, a row per sample, padded with 0",
        asked_by=("return_log_probs",),
    ),
    *(
        Output(
            name=name,
            kind=Kind.TIME_NS,
            meaning=f"{meaning}, in ns since 1970",
            asked_by=("return_perf_metrics",),
        )
        for name, meaning in (
            ("arrival_time_ns", "when the request arrived"),
            ("first_scheduled_time_ns", "when it got its row in the batch"),
            ("first_token_time_ns", "when its first token was made"),
            ("last_token_time_ns", "when its newest token was made"),
        )
    ),
)

REQUEST: Final = Tensor(name="request", kind=Kind.TEXT)
"""tokenizer -> llm_engine: the validated request (``record``)."""
INPUT_IDS: Final = Tensor(name="input_ids", kind=Kind.INTEGERS)
"""tokenizer -> llm_engine, or from a client: the prompt."""
TOKEN_STRS: Final = Tensor(name="token_strs", kind=Kind.TEXTS)
"""tokenizer -> its direct clients: the tokens as the vocabulary spells them."""
TEXT: Final = Tensor(name="text", kind=Kind.TEXT)
"""tokenizer -> its direct clients: the text of the tokens, special ones spelled out."""
MAX_SEQUENCE_LENGTH: Final = Tensor(name="max_sequence_length", kind=Kind.INTEGER)
"""tokenizer -> its direct clients: the most tokens of a prompt and its answer."""
CHAT_FORMAT: Final = Tensor(name="chat_format", kind=Kind.TEXT)
"""tokenizer -> its direct clients: what the chat template reveals about the answer, a JSON object
(``ChatFormat``); null without a chat."""
LOOKUPS: Final = (TOKEN_STRS, TEXT, MAX_SEQUENCE_LENGTH, CHAT_FORMAT)
LORA_ORDER: Final = Tensor(name="lora_order", kind=Kind.TEXT)
"""client -> llm_engine, instead of a prompt: a JSON object {"load": {"name": ..., "path": ...}},
{"unload": name} or {}. The answer is ``LORA_ADAPTERS``."""
LORA_ADAPTERS: Final = Tensor(name="lora_adapters", kind=Kind.TEXT)
"""llm_engine -> client: a JSON list of the adapters that requests may name, each
{"name": ..., "path": ...}."""
OUTPUT_IDS: Final = Tensor(name="output_ids", kind=Kind.INTEGERS)
"""llm_engine -> its direct clients: the new tokens, one sample after another."""
CHUNK: Final = Tensor(name="chunk", kind=Kind.BYTES)
"""llm_engine -> detokenizer: a packet of token ids (``packets``)."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "beam_width": (1,),
        "length_penalty": (1,),
        "use_beam_search": (False,),
        "early_stopping": (False,),
        "echo": (False,),
        "embedding_bias_weights": ("", []),
        "embedding_bias_words": ("", [], [""]),
        "suffix": ("",),
        "bad_words": ("", [], [""]),
        "include_stop_str_in_output": (False,),
        "spaces_between_special_tokens": (True,),
        "detokenize": (True,),
        "return_context_logits": (False,),
        "return_generation_logits": (False,),
        "return_kv_cache_reuse_stats": (False,),
        "allowed_token_ids": (),
        "chat_template": (),
        "guided_decoding_backend": ("auto", "guidance"),
        "guided_whitespace_pattern": (),
        "image": ("", [], [""]),
        "image_bytes": (),
        "image_input": (),
        "image_url": (),
        "logits_processors": (),
        "multi_modal_data": ({},),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
        "truncate_prompt_tokens": (),
    }
)
"""Options that are known but not offered, with the values that are accepted as they change nothing.
"""

TRITON_NAMES: Final = frozenset(
    {"id", "priority", "timeout", "headers", "binary_data_output", "binary_data_size"}
)
TRITON_PREFIXES: Final = ("sequence_", "triton_")
"""Request parameters of Triton itself, which are ignored, but ``parse`` reads ``timeout``."""


def _by_name() -> Mapping[str, Input]:
    table = {}
    for entry in INPUTS:
        for name in entry.all_names:
            assert name not in table, name
            table[name] = entry
    return MappingProxyType(table)


BY_NAME: Final[Mapping[str, Input]] = _by_name()
"""The entry of every name and synonym."""

DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {entry.name: entry.default for entry in INPUTS}
)
"""The default of every entry; None if there is none."""
