"""The operator's options (``EngineOptions``).

Knows names, types, defaults and ranges. Must not know devices, model files or Triton: what depends
on those is decided later, the dtype in ``resolve``, the number of pages in ``rank_memory``, the
attention backend in ``build_rank``.

Options come as strings (from config.pbtxt or the command line) or as values of their type. An
unknown name is an error that names the nearest known one. An empty string or ``auto`` stands for
the default.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_type_hints

from minisgl_backend.errors import ConfigError

_WEEK_S: Final = 604_800
_MOST_SEED: Final = 2**63 - 1
DEMO_MODEL: Final = str(Path(__file__).parent / "demo_model")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    begins: str | None = None,
) -> Any:
    """A dataclass field with its description, allowed values and range. ``begins`` names the
    subject that starts with this option."""
    meta = {
        "help": help,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "begins": begins,
    }
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """All options of the engine. ``None`` stands for ``auto``: the engine decides."""

    model: str = option(DEMO_MODEL, "folder of a checkpoint, or its id on the hub", begins="model")
    model_source: str = option(
        "hf", "hub on which an id is looked up", choices=("hf", "modelscope")
    )
    tokenizer: str | None = option(None, "folder or id of the tokenizer; auto: the model's")
    load_format: str = option(
        "auto", "auto reads safetensors; dummy makes random weights", choices=("auto", "dummy")
    )
    dtype: str | None = option(
        None,
        "type of weights and activations; auto: 16 bits on a GPU, and for large "
        "models on CPUs with fast 16-bit arithmetic, else float32",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    quantization: str | None = option(
        None,
        "fp8 converts plain weights to 8-bit floats in blocks of 128 x 128 while they load; auto: "
        "weights stay as the checkpoint has them",
        choices=("fp8",),
    )
    device: str | None = option(
        None, "where the model runs; auto: on a GPU if there is one", choices=("cpu", "cuda")
    )

    memory_ratio: float = option(
        0.9,
        "share of the memory that is free after loading, for KV pages, and for the tables "
        "and recurrent states of rows",
        minimum=0.01,
        maximum=1.0,
        begins="memory",
    )
    page_size: int = option(16, "token positions per page of KV", minimum=1, maximum=1024)
    num_pages: int | None = option(
        None, "pages of KV; auto: as many as fit the free memory, on a CPU at most 2 GiB", minimum=1
    )
    kv_cache_dtype: str | None = option(
        None,
        "type of the KV cache; fp8 is fp8_e4m3; auto: that of the activations",
        choices=("fp8_e4m3", "fp8"),
    )
    state_dtype: str | None = option(
        None,
        "type of recurrent states, for models with recurrent layers; auto: mamba_ssm_dtype or "
        "mamba_ssm_cache_dtype of the checkpoint, else float32",
        choices=("float32", "bfloat16", "float16"),
    )
    cache: str = option(
        "radix",
        "radix shares the KV of common prefixes; naive does not",
        choices=("radix", "naive"),
    )
    host_cache_gib: float = option(
        0.0,
        "GiB of main memory that keep prefixes which no longer fit on the device, for each "
        "replica; 0 is off",
        minimum=0,
    )
    state_snapshots: int | None = option(
        None,
        "copies of recurrent states that the prefix cache keeps, for models with recurrent layers; "
        "auto: 4 for each running request, but at most a quarter of the memory for pages",
        minimum=1,
    )

    max_running_requests: int = option(
        256,
        "most requests that run at the same time",
        minimum=1,
        maximum=4096,
        begins="batching and queueing",
    )
    max_prefill_tokens: int = option(8192, "most prompt tokens computed in one step", minimum=1)
    max_sequence_length: int | None = option(
        None, "most tokens of a request, prompt and output; auto: the model's context", minimum=2
    )
    max_queued_requests: int = option(1024, "most requests that wait", minimum=0)
    max_queued_tokens: int = option(4_000_000, "most prompt tokens that wait", minimum=0)
    max_queue_time_s: float | None = option(
        None, "a request that waits for longer than this is refused; auto: no limit", minimum=0.001
    )
    schedule_policy: str = option(
        "fcfs",
        "which waiting request is next: the oldest, or the one with the longest cached prefix",
        choices=("fcfs", "lpm"),
    )
    max_overtaken: int | None = option(
        None,
        "most later requests that may pass a waiting one, so that requests with a common prefix "
        "compute it once and run together; 0: none; auto: 0 with cache naive, 64 with lpm, else "
        "256 on a CPU, 1024 on a GPU whose decoding requests read shared pages together, 0 on "
        "others",
        minimum=0,
    )
    overlap: bool = option(True, "plan the next step while the current one runs")
    speculative_tokens: int = option(
        0,
        "most tokens that are guessed for a request, where its last tokens have occurred before or "
        "its grammar leaves no choice, and checked in one step; 0: none",
        minimum=0,
        maximum=64,
    )
    speculative_mtp_tokens: int = option(
        0,
        "tokens that the model's layer for multi-token prediction (MTP), or the EAGLE-3 layer in "
        "its place, guesses for a request, to be checked in the next step; 0: no such layer is "
        "loaded",
        minimum=0,
        maximum=16,
    )
    speculative_mtp_model: str | None = option(
        None,
        "folder of an EAGLE-3 layer that was made for this model, or its id on the hub; it guesses "
        "in place of the model's own MTP layer; auto: none",
    )
    speculative_max_requests: int = option(
        8, "nothing is guessed while more requests than this run", minimum=1, maximum=4096
    )
    speculative_recent_tokens: int = option(
        65536,
        "tokens of ended answers in which guesses are looked for, too, by requests that share "
        "cached prefixes with them; 0: none",
        minimum=0,
        maximum=2**20,
    )

    attention_backend: str | None = option(
        None,
        "on a CPU sdpa; on a GPU cuda, triton, fa, fi, trtllm or sdpa, or a pair PREFILL,DECODE",
        begins="kernels and CUDA graphs",
    )
    group_attention: bool | None = option(
        None,
        "decoding requests that share pages read them together if that is faster; on a GPU it "
        "needs attention_backend cuda and bfloat16; auto: if attention supports it",
    )
    moe_backend: str | None = option(
        None, "how experts are computed; auto: fused on a GPU", choices=("torch", "fused")
    )
    batch_invariant: bool = option(
        False,
        "on a GPU, a request gets the same tokens whatever runs beside it and whatever is cached; "
        "some steps take longer",
    )
    cuda_graph_max_batch_size: int | None = option(
        None,
        "largest batch that is captured; 0 turns CUDA graphs off; auto: max_running_requests, or "
        "less if the model is large, but at least 256",
        minimum=0,
        maximum=4096,
    )
    cuda_graph_batch_sizes: str | None = option(None, "batch sizes to capture, as 1,2,4")
    cuda_graph_max_tokens: int | None = option(
        None, "most tokens of a step with prompts that is captured; 0 captures none", minimum=0
    )

    enable_lora: bool = option(False, "let requests name LoRA adapters", begins="adapters")
    max_loras: int = option(
        8, "most adapters that the requests of one step may use together", minimum=1, maximum=1024
    )
    max_cpu_loras: int | None = option(
        None, "adapters that main memory holds; auto: twice max_loras", minimum=1
    )
    max_lora_rank: int = option(16, "largest rank of an adapter", minimum=1, maximum=512)
    lora_modules: str | None = option(
        None,
        "adapters by name, NAME=PATH,NAME=PATH",
    )
    multi_lora: str | None = option(
        None,
        "JSON file {name: path} of adapters; auto: multi_lora.json in the engine's folder of the "
        "model repository, 1/, if it is there",
    )
    lora_task_ids: str | None = option(
        None, "adapters by the number that lora_task_id gives, NUMBER=NAME,NUMBER=NAME"
    )
    lora_updates: bool = option(False, "let requests load and unload adapters at run time")

    tensor_parallel_size: int = option(
        1,
        "ranks of the engine, each on a GPU of its own, or all on a CPU",
        minimum=1,
        begins="ranks and nodes",
    )
    expert_parallel: bool = option(
        False, "each rank holds some of the experts whole; else a slice of every expert"
    )
    comm: str | None = option(
        None,
        "library by which ranks communicate",
        choices=("nccl", "pynccl", "cuda", "gloo"),
    )
    distributed_timeout_s: float = option(
        60.0, "a rank that is silent for longer than this is lost", minimum=1, maximum=_WEEK_S
    )
    nnodes: int | None = option(
        None,
        "machines over which the ranks are spread evenly; auto: minisgl serve takes it from the "
        "environment, else 1",
        minimum=1,
        maximum=1024,
    )
    node_rank: int | None = option(
        None,
        "which of the machines this is; 0 leads; auto: minisgl serve takes it from the "
        "environment, else 0",
        minimum=0,
    )
    rendezvous: str | None = option(
        None,
        "where ranks meet at the start, HOST:PORT of node 0; auto: a free port of this machine, "
        "or with several nodes the one in the environment",
    )
    node_secret_file: str | None = option(
        None,
        "file with the secret that all nodes share; auto: the variable MINISGL_NODE_SECRET. "
        "Needed unless rendezvous is a loopback address",
    )

    data_parallel_size: int = option(
        1,
        "replicas of the engine, each a process with weights, pages and tensor_parallel_size ranks "
        "of its own; a request goes to the one that has most of its prompt cached",
        minimum=1,
        maximum=64,
        begins="replicas",
    )
    routing_ratio: float | None = option(
        None,
        "a replica whose load is above this multiple of the mean, plus routing_slack, gets no "
        "requests for what it has cached; auto: 1.2",
        minimum=1,
    )
    routing_slack: float | None = option(
        None,
        "share of what a replica can hold: see routing_ratio; auto: 0.03",
        minimum=0,
        maximum=1,
    )

    structured_outputs: bool = option(
        True,
        "let requests ask for output that follows a schema, a regular expression or a grammar",
        begins="requests and answers",
    )
    seed: int | None = option(
        None,
        "start of the random seeds for requests that bring none; auto: a new one at each start",
        minimum=0,
        maximum=_MOST_SEED,
    )
    num_tokenizers: int = option(2, "threads that tokenize", minimum=1, maximum=64)
    sampling_defaults: str = option(
        "request",
        "temperature, top_p, top_k, min_p and repetition_penalty of requests that leave them out: "
        "request, the defaults of these parameters; model, what generation_config.json recommends",
        choices=("request", "model"),
    )
    parse_special_tokens: bool = option(
        False,
        "default of the request parameter of that name; set it behind Triton's OpenAI frontend",
    )
    exclude_input_in_output: bool = option(
        True,
        "default of the request parameter of that name for a text_input without stream; with false "
        "the answer begins with the prompt, as in vllm_backend",
    )
    min_chunk_interval_ms: int = option(
        0, "least time between two responses of a stream", minimum=0
    )
    cancel_grace_ms: int = option(
        300,
        "a packet counts as lost, and its request ends, once one sent this much later is "
        "acknowledged; a second more if that was on another lane of the detokenizer",
        minimum=1,
    )
    drain_timeout_s: float = option(
        30.0, "time that open requests have to finish at a stop", minimum=0, maximum=_WEEK_S
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check_range(spec, getattr(self, spec.name))

    @property
    def most_guessed(self) -> int:
        """The most guesses of a request that a step checks."""
        return max(self.speculative_tokens, self.speculative_mtp_tokens)

    @property
    def most_checks(self) -> int:
        """The most requests whose guesses a step checks."""
        num_rows = min(self.speculative_max_requests, self.max_running_requests)
        return num_rows if self.most_guessed else 0

    @property
    def most_guesses(self) -> int:
        """The most guesses that a step checks."""
        return min(self.most_guessed * self.most_checks, self.max_prefill_tokens // 2)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineOptions:
        """Options from their names and values; a value is a string or of the option's type.

        Raises ``ConfigError`` for an unknown name, and for a value that is malformed or out of
        range.
        """
        known = {spec.name: spec for spec in fields(cls)}
        parsed = {}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(f"unknown option {name!r}{did_you_mean(name, known)}")
            if value not in (None, "", "auto"):
                parsed[name] = _parse(name, value)
        return cls(**parsed)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the nearest of the ``known`` names, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def options_by_subject() -> dict[str, list[Field[Any]]]:
    """All options, in the order of their definition."""
    subjects: dict[str, list[Field[Any]]] = {}
    for spec in fields(EngineOptions):
        if spec.metadata["begins"] is not None:
            subjects[spec.metadata["begins"]] = []
        subjects[next(reversed(subjects))].append(spec)
    return subjects


def option_type(name: str) -> type:
    """The type of an option's value: str, int, float or bool."""
    return _TYPES[name]


def _plain_types() -> Mapping[str, type]:
    hints = get_type_hints(EngineOptions)
    plain = {}
    for name, hint in hints.items():
        members = [t for t in getattr(hint, "__args__", (hint,)) if t is not type(None)]
        plain[name] = members[0]
    return MappingProxyType(plain)


_TYPES: Final = _plain_types()
_GROUPED: Final = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+")
"""A number with thousands separators, as in 4,000,000; other commas are mistakes."""
_KIND_WORDS: Final = MappingProxyType(
    {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
)
_BOOL_WORDS: Final = MappingProxyType(
    {"true": True, "1": True, "yes": True, "on": True}
    | {"false": False, "0": False, "no": False, "off": False}
)


def _parse(name: str, value: Any) -> Any:
    kind = _TYPES[name]
    if isinstance(value, str):
        if kind is bool and value.lower() in _BOOL_WORDS:
            return _BOOL_WORDS[value.lower()]
        if kind in (int, float):
            try:
                return kind(value.replace(",", "") if _GROUPED.fullmatch(value) else value)
            except ValueError:
                pass
        if kind is str:
            return value
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif type(value) is kind:
        return value
    raise ConfigError(f"option {name} must be {_KIND_WORDS[kind]}, got {value!r}")


def _check_range(spec: Field[Any], value: Any) -> None:
    if value is None:
        return
    meta = spec.metadata
    if meta["choices"] and value not in meta["choices"]:
        words = ", ".join(meta["choices"])
        raise ConfigError(f"option {spec.name} must be one of {words}, got {value!r}")
    low, high = meta["minimum"], meta["maximum"]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"option {spec.name} must be finite, got {value}")
    if low is not None and value < low:
        raise ConfigError(f"option {spec.name} must be at least {_plain(low)}, got {_plain(value)}")
    if high is not None and value > high:
        raise ConfigError(f"option {spec.name} must be at most {_plain(high)}, got {_plain(value)}")


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
