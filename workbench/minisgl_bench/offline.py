"""`minisgl bench offline`: throughput of the engine in this process, without a server.

All requests are submitted at once. With `--compare transformers` the same prompts then go, one by
one, through `transformers.generate` on the same device, in the same dtype and the same run; with
`--compare NAME=VALUE,...` through an engine of these options; with `--n 16 --compare requests` each
of the 16 samples of a prompt is a request of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import MAX_SAMPLES, Request, SamplingParams, samples_of
from minisgl_backend.runtime.door import Door
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import Collector, engine_facts, running_door
from minisgl_bench.profiling import nvtx_option, profile_option, profiled
from minisgl_bench.prompts import Prompt, RandomRequests, request_options
from minisgl_kit.report import Report, json_option

_TRANSFORMERS: Final = "transformers"
_REQUESTS: Final = "requests"


def run_engine(
    engine: Door,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int = 1,
    apart: bool = False,
) -> tuple[list[Collector], float]:
    """Submit all prompts at once; returns the sinks of their ``n`` samples, and the seconds for
    all.

    Only seed and number of tokens differ in their sampling. With ``apart`` the samples are requests
    of their own, which find nothing in the cache that others have left there.
    """
    sinks = []
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        own = replace(
            sampling, max_tokens=prompt.num_output_tokens, seed=n * index, ignore_eos=True
        )
        ids = [engine.new_id() for _ in range(n)]
        salt = "apart" if apart else ""
        first = Request(id=ids[0], prompt=prompt.tokens, sampling=own, cache_salt=salt)
        samples = samples_of(first, ids)
        collectors = [Collector() for _ in samples]
        if apart:
            for sample, sink in zip(samples, collectors, strict=True):
                engine.submit(replace(sample, leader=None), sink)
        else:
            engine.submit_samples(samples, collectors)
        sinks += collectors
    for sink in sinks:
        sink.wait()
    return sinks, time.perf_counter() - started


def figures_of(
    prompts: Sequence[Prompt], sinks: Sequence[Collector], seconds: float
) -> dict[str, Any]:
    """The figures of a run; times in milliseconds."""
    num_tokens = sum(len(sink.tokens) for sink in sinks)
    first_ms = [1e3 * (sink.times_s[0] - sink.sent_s) for sink in sinks]
    each_ms = [
        1e3 * (sink.times_s[-1] - sink.times_s[0]) / (len(sink.tokens) - 1)
        for sink in sinks
        if len(sink.tokens) > 1
    ]
    return {
        "requests": len(prompts),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "output_tokens": num_tokens,
        "longest": max(len(prompt.tokens) + prompt.num_output_tokens for prompt in prompts),
        "seconds": seconds,
        "tokens_per_s": num_tokens / seconds,
        **p50_and_p99("ttft", first_ms),
        **p50_and_p99("tpot", each_ms),
    }


def p50_and_p99(name: str, values_ms: Sequence[float]) -> dict[str, float]:
    """``NAME_p50_ms`` and ``NAME_p99_ms``; none if there are no values."""
    if not values_ms:
        return {}
    return {f"{name}_p{q}_ms": float(np.percentile(values_ms, q)) for q in (50, 99)}


def transformers_runner(
    path: Path, dtype: str, device: str, *, has_weights: bool = True
) -> Callable[[Sequence[Prompt]], tuple[list[list[int]], float]]:
    """``run_engine`` by transformers: one greedy prompt after another.

    Without weights in ``path`` they are random. On a CPU the first call, the warm-up, finds out
    whether one thread or PyTorch's default is faster: small models are often slower with more.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    of_type = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
    model: Any
    if has_weights:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **of_type)
    else:
        from_config: Any = transformers.AutoModelForCausalLM.from_config
        model = from_config(transformers.AutoConfig.from_pretrained(path), **of_type)
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


def beside(
    outputs: Sequence[list[int]],
    tokens_per_s: float,
    expected: Sequence[list[int]],
    seconds: float,
    *,
    same_weights: bool = True,
) -> dict[str, Any]:
    """The engine's outputs and rate, compared with another one's for the same prompts."""
    compare_tokens_per_s = sum(map(len, expected)) / seconds
    equal = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
    return {
        "compare_tokens_per_s": compare_tokens_per_s,
        "times_faster": tokens_per_s / compare_tokens_per_s,
        "equal_outputs": f"{equal}/{len(outputs)}" if same_weights else "-",
    }


@click.command(cls=EngineCommand)
@engine_options
@request_options
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is off")
@click.option(
    "--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True, help="1 is off"
)
@click.option(
    "--repetition-penalty",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="1 is off",
)
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    help="alternatives beside each token's log-probability  [default: no logprobs]",
)
@click.option(
    "--n",
    type=click.IntRange(1, MAX_SAMPLES),
    default=1,
    show_default=True,
    help="samples of each prompt",
)
@compare_option
@nvtx_option
@profile_option
@json_option
def offline(
    options: EngineOptions,
    requests: RandomRequests,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    logprobs: int | None,
    n: int,
    compare: str | None,
    nvtx: bool,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """Throughput of the engine in this process, all requests submitted at once.

    --compare also takes "transformers", the same prompts there, one by one, and "requests": each of
    the --n samples as a request of its own.
    """
    with_transformers, with_requests = compare == _TRANSFORMERS, compare == _REQUESTS
    if with_transformers and n > 1:
        raise click.UsageError("--compare transformers needs --n 1")
    if with_transformers and (requests.temperature or repetition_penalty != 1):
        raise click.UsageError("--compare transformers needs --temperature 0, and no penalty")
    sampling = SamplingParams(
        temperature=requests.temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        num_logprobs=logprobs,
    )

    def measure(options: EngineOptions, trace: Path | None) -> Report:
        from minisgl_backend.models.hub import resolve_model

        with running_door(options, nvtx=nvtx) as engine:
            vocab_size = engine.info.vocab_size
            prompts, warm_up = requests.prompts(vocab_size), requests.warm_up(vocab_size)
            run_engine(engine, warm_up, sampling, n=n)
            steps = engine.stats().num_steps
            sinks, seconds = run_engine(engine, prompts, sampling, n=n)
            steps = engine.stats().num_steps - steps
            apart = (
                run_engine(engine, prompts, sampling, n=n, apart=True) if with_requests else None
            )
            facts = engine_facts(engine.info, options)
            asked = {
                "temperature": sampling.temperature,
                "top_k": top_k,
                "top_p": top_p,
                "repetition_penalty": repetition_penalty,
                "logprobs": "no" if logprobs is None else logprobs,
            }
            facts["sampling"] = " ".join(f"{name}={value}" for name, value in asked.items())
            report = Report("offline throughput", info=facts)
            if trace is not None:
                again = requests.again(vocab_size)
                with profiled(trace):
                    run_engine(engine, again, sampling, n=n)
        figures = figures_of(prompts, sinks, seconds)
        figures["n"] = n
        figures["mean_batch"] = figures["output_tokens"] / steps
        if apart is not None:
            expected, apart_seconds = [sink.tokens for sink in apart[0]], apart[1]
            outputs = [sink.tokens for sink in sinks]
            figures |= beside(outputs, figures["tokens_per_s"], expected, apart_seconds)
        if with_transformers:
            folder, info = resolve_model(options.model, options.model_source), engine.info
            has_weights = options.load_format != "dummy"
            run = transformers_runner(folder, info.dtype, info.device, has_weights=has_weights)
            run(warm_up[:2])
            outputs = [sink.tokens for sink in sinks]
            rate = figures["tokens_per_s"]
            figures |= beside(outputs, rate, *run(prompts), same_weights=has_weights)
        report.add(**figures)
        return report

    other = None if with_transformers or with_requests else compare
    keys = ("requests", "prompt_tokens", "output_tokens", "longest")
    measure_both(measure, options, other, keys=keys, trace=profile_path, json_path=json_path)
