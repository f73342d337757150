"""What a request may say besides its prompt, typed for ``**parameters: Unpack[Parameters]``.

Knows names and types; defaults and ranges are the server's. The prompt's own names, ``stream`` and
``stop_request`` are arguments and methods of the clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class StructuredOutputs(TypedDict, total=False):
    """The form that an answer must have: exactly one of these."""

    json: Mapping[str, Any] | bool | str
    """A JSON schema, or its text."""
    json_object: bool
    """True: any JSON object."""
    regex: str
    """An expression in the syntax of Rust's regex, which the whole answer must match."""
    choice: Sequence[str]
    """The answer is one of these."""
    grammar: str
    """A context-free grammar, in Lark or in llama.cpp's GBNF."""
    structural_tag: Mapping[str, Any] | str
    """Free text in which a trigger must continue as one of the structures that begin with it:
    ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, or vLLM's form."""


class Parameters(TypedDict, total=False):
    """All of them are optional; None stands for absent. Synonyms follow their names.

    A name that is not here can be sent too (``**{"suffix": ""}``): the server names the nearest one
    that it knows, or accepts a known name whose value changes nothing.
    """

    n: int | None
    """Samples of the answer, 1 .. 64. With a seed, sample i uses seed + i, modulo 2**64."""
    num_return_sequences: int | None
    best_of: int | None
    """Samples to make, n .. 64; the answer is the ``n`` most likely. ``n`` if absent; with
    ``stream`` it must be ``n``."""
    max_tokens: int | None
    """Tokens to generate, 1 .. context - prompt; 16 if absent. 0 with ``num_prompt_logprobs``."""
    max_new_tokens: int | None
    fit_max_tokens: bool | None
    """Fewer than ``max_tokens`` if there is no room for more; True if that is absent."""
    min_tokens: int | None
    """No end of sequence and no stop match before there are this many tokens."""
    min_length: int | None
    temperature: float | None
    """0 is greedy; 1.0 if absent."""
    top_p: float | None
    """1.0 is off."""
    top_k: int | None
    """0 and -1 are off."""
    min_p: float | None
    """0.0 is off."""
    repetition_penalty: float | None
    """1.0 is off."""
    presence_penalty: float | None
    """-2.0 .. 2.0; 0 is off."""
    frequency_penalty: float | None
    """-2.0 .. 2.0; 0 is off."""
    seed: int | None
    """The seed of the random numbers, 0 .. 2**64 - 1. With the same seed, a CPU in float32 repeats
    an answer. Drawn if absent."""
    random_seed: int | None
    stop: str | Sequence[str] | None
    """Stop strings; matched on text, not part of the answer."""
    stop_words: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    """Added to the model's own."""
    end_id: int | None
    ignore_eos: bool | None
    """The model's end of sequence does not end the answer."""
    num_logprobs: int | None
    """Number of most likely tokens at each position, 0 .. 20; asks for ``logprobs``."""
    num_prompt_logprobs: int | None
    """Number of most likely tokens at each position, 0 .. 20; asks for ``prompt_logprobs``."""
    embed: bool | None
    """Return ``embedding``, and generate nothing."""
    return_logprobs: bool | None
    """Logprobs of the chosen tokens alone."""
    return_log_probs: bool | None
    logit_bias: Mapping[int, float] | str | None
    """Added to the logits of these token ids, -100 .. 100."""
    structured_outputs: StructuredOutputs | str | None
    """The form of the answer; docs/structured_outputs.md says what may be asked."""
    guided_decoding_guide_type: str | None
    """The same as clients of the TensorRT-LLM backend say it: ``json``, ``json_schema``, ``regex``
    or ``ebnf_grammar``; the next parameter is its text."""
    guided_decoding_guide: str | None
    priority_level: int | None
    """Higher goes first; 0 if absent."""
    timeout_ms: int | None
    """Deadline for the whole request; the client's ``timeout_s`` if absent."""
    cache_salt: str | None
    """The prefix cache is shared only among requests with the same salt."""
    lora_name: str | None
    """The LoRA adapter to answer with; ``lora_task_id`` names one by its number."""
    lora_task_id: int | None
    min_chunk_interval_ms: int | None
    """The shortest time between two deltas, in ms."""
    chat_template_kwargs: Mapping[str, Any] | str | None
    """Variables for the chat template, such as ``{"enable_thinking": False}``."""
    add_generation_prompt: bool | None
    """False: the text of ``messages`` does not end with the beginning of an answer."""
    parse_special_tokens: bool | None
    """Special-token text in the prompt becomes control tokens."""
    add_special_tokens: bool | None
    """False: the prompt does not get the special tokens that the tokenizer puts around a text."""
    exclude_input_in_output: bool | None
    """False: the text begins with the prompt; with ``generate(prompt)`` only."""
    skip_special_tokens: bool | None
    """False: the text of special tokens stays in the answer, except that of the end token."""
    sampling_parameters: Mapping[str, Any] | str | None
    """More of these names at once, as vllm_backend's clients send them."""
    beam_width: int | None
    """1, or the server refuses it; likewise the next two: 1.0 and none."""
    length_penalty: float | None
    bad_words: str | Sequence[str] | None
    pad_id: int | None
    """Without effect."""
    return_finish_reason: bool | None
    """This and the three counts are asked for by default; False spares the server the work."""
    return_num_input_tokens: bool | None
    return_num_output_tokens: bool | None
    return_num_cached_tokens: bool | None
    return_stop_reason: bool | None
    """Asked for by default."""
    return_cumulative_logprob: bool | None
    return_context_logits: bool | None
    """False, or the server refuses it; likewise the next two."""
    return_generation_logits: bool | None
    return_kv_cache_reuse_stats: bool | None
    return_perf_metrics: bool | None
    """Ask for the server's times."""
