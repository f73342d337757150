"""`minisgl bench offline`: throughput of the engine in this process, without a server.

All requests are submitted at once. With `--compare transformers` the same prompts then go, one by
one, through `transformers.generate` on the same device, in the same dtype and the same run.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from minisgl_backend.bench.report import Report, engine_facts, json_option, profile_option, profiled
from minisgl_backend.cli.options import engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.request import (
    Event,
    Failed,
    Finished,
    Generated,
    IntArray,
    Request,
    SamplingParams,
    TokenLogprobs,
)
from minisgl_backend.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of random tokens and the number of tokens to make after it."""

    tokens: IntArray
    num_output_tokens: int


@dataclass(slots=True)
class Collector:
    """The sink of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    error: MiniSGLError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Generated):
            self.tokens.append(event.token_id)
            self.logprobs.append(event.logprobs)
        elif isinstance(event, Failed):
            self.error = event.error
            self.done.set()
        elif isinstance(event, Finished):
            self.done.set()


def random_prompts(
    count: int,
    *,
    input_length: tuple[int, int],
    output_length: tuple[int, int],
    vocab_size: int,
    seed: int,
) -> list[Prompt]:
    """Prompts with lengths drawn evenly from the two ranges, both ends included.

    All prompts are drawn first, of the first 10,001 token ids, then all output lengths: with seed 0
    and the ranges 100 to 1024 these are the 256 requests that nano-vllm and mini-sglang publish
    figures for (142,827 tokens in, 133,966 out).
    """
    rng = random.Random(seed)
    most = min(10_000, vocab_size - 1)
    prompts = [
        np.array([rng.randint(0, most) for _ in range(rng.randint(*input_length))], dtype=np.int32)
        for _ in range(count)
    ]
    return [Prompt(tokens, rng.randint(*output_length)) for tokens in prompts]


def run_engine(
    engine: Engine, prompts: Sequence[Prompt], *, temperature: float
) -> tuple[list[list[int]], float]:
    """Submit all prompts at once; the tokens of each and the seconds for all."""
    sinks = []
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            max_tokens=prompt.num_output_tokens,
            temperature=temperature,
            seed=index,
            ignore_eos=True,
        )
        sink = Collector()
        engine.submit(Request(id=engine.new_id(), prompt=prompt.tokens, sampling=sampling), sink)
        sinks.append(sink)
    for sink in sinks:
        sink.done.wait()
        if sink.error is not None:
            raise sink.error
    return [sink.tokens for sink in sinks], time.perf_counter() - started


def transformers_runner(
    path: Path, dtype: str, device: str
) -> Callable[[Sequence[Prompt]], tuple[list[list[int]], float]]:
    """A function that does what ``run_engine`` does, one greedy prompt after another.

    Its first call, the warm-up, finds out whether one thread or PyTorch's default suits it better
    on a CPU: small models are often slower with more.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), trust_remote_code=False
    )
    model = model.to(device).eval()

    choices = {1, torch.get_num_threads()} if device == "cpu" else set()

    def run(prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        if choices:
            seconds = {}
            for num_threads in sorted(choices):
                torch.set_num_threads(num_threads)
                seconds[num_threads] = generate(prompts)[1]
            torch.set_num_threads(min(seconds, key=seconds.__getitem__))
            choices.clear()
        return generate(prompts)

    def generate(prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        outputs = []
        started = time.perf_counter()
        for prompt in prompts:
            ids = torch.from_numpy(prompt.tokens.astype(np.int64))[None].to(device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=prompt.num_output_tokens,
                min_new_tokens=prompt.num_output_tokens,
                eos_token_id=None,
                pad_token_id=0,
                do_sample=False,
            )
            outputs.append(out[0, len(prompt.tokens) :].tolist())
        return outputs, time.perf_counter() - started

    return run


@click.command()
@engine_options
@click.option("--requests", default=16, show_default=True, help="requests in flight at once")
@click.option(
    "--input-length", nargs=2, type=int, default=(16, 64), show_default=True, metavar="MIN MAX"
)
@click.option(
    "--output-length", nargs=2, type=int, default=(64, 128), show_default=True, metavar="MIN MAX"
)
@click.option("--temperature", default=0.0, show_default=True, help="0 is greedy")
@click.option("--prompt-seed", default=0, show_default=True, help="of the random prompts")
@click.option(
    "--compare", type=click.Choice(["transformers"]), help="run the same prompts there, one by one"
)
@profile_option
@json_option
def offline(
    options: EngineOptions,
    requests: int,
    input_length: tuple[int, int],
    output_length: tuple[int, int],
    temperature: float,
    prompt_seed: int,
    compare: str | None,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Throughput of the engine in this process, all requests submitted at once."""
    from minisgl_backend.build import build_engine
    from minisgl_backend.resolve import resolve_checkpoint

    if compare and temperature:
        raise click.UsageError("--compare needs --temperature 0")
    engine = build_engine(options)
    try:
        info = engine.info
        prompts = random_prompts(
            requests,
            input_length=input_length,
            output_length=output_length,
            vocab_size=info.vocab_size,
            seed=prompt_seed,
        )
        # other tokens than the measured ones, so that the prefix cache does not know them
        warm_up = random_prompts(
            requests,
            input_length=input_length,
            output_length=(8, 8),
            vocab_size=info.vocab_size,
            seed=prompt_seed + 1,
        )
        run_engine(engine, warm_up, temperature=temperature)
        with profiled(profile_path):
            outputs, seconds = run_engine(engine, prompts, temperature=temperature)
    finally:
        engine.close(drain_s=0)

    num_tokens = sum(map(len, outputs))
    report = Report("offline throughput", info=engine_facts(info))
    row: dict[str, Any] = {
        "requests": requests,
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "output_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
    }
    if compare:
        run_compare = transformers_runner(resolve_checkpoint(options), info.dtype, info.device)
        run_compare(warm_up[:2])
        expected, compare_seconds = run_compare(prompts)
        row["compare_tokens_per_s"] = sum(map(len, expected)) / compare_seconds
        row["times_faster"] = row["tokens_per_s"] / row["compare_tokens_per_s"]
        equal = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
        row["equal_outputs"] = f"{equal}/{requests}"
    report.add(**row)
    report.emit(json_path)
