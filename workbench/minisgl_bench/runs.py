"""Runs of many prompts at once in this process, by the engine or by transformers, and their
figures. Must not know servers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minisgl_backend.request import Request, SamplingParams, samples_of
from minisgl_backend.runtime.engine_base import EngineBase
from minisgl_bench.engines import Collector
from minisgl_bench.prompts import Prompt


def run_engine(
    engine: EngineBase,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int = 1,
    apart: bool = False,
) -> tuple[list[Collector], float]:
    """Submit all prompts at once; returns the sinks of their ``n`` samples, and the total seconds.

    Their sampling differs only in seed and number of tokens. With ``apart`` the samples are
    separate requests, which find nothing in the cache that others have left there.
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


class TransformersRunner:
    """``run_engine`` by transformers: one greedy prompt after another."""

    def __init__(self, path: Path, dtype: str, device: str, *, has_weights: bool) -> None:
        """Weights are random if ``path`` has none."""
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
        self._model = model.to(device).eval()
        self._device = device

    def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Find out on a CPU whether one thread or PyTorch's default is faster: small models are
        often slower with more."""
        import torch

        if self._device != "cpu":
            self.run(prompts)
            return
        seconds = {}
        for num_threads in sorted({1, torch.get_num_threads()}):
            torch.set_num_threads(num_threads)
            seconds[num_threads] = self.run(prompts)[1]
        torch.set_num_threads(min(seconds, key=seconds.__getitem__))

    def run(self, prompts: Sequence[Prompt]) -> tuple[list[list[int]], float]:
        """The tokens of all prompts, and the total seconds."""
        import torch

        outputs = []
        started = time.perf_counter()
        for prompt in prompts:
            ids = torch.from_numpy(prompt.tokens.astype(np.int64))[None].to(self._device)
            out = self._model.generate(
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


def beside(
    outputs: Sequence[list[int]],
    tokens_per_s: float,
    expected: Sequence[list[int]],
    seconds: float,
    *,
    same_weights: bool = True,
) -> dict[str, Any]:
    """The engine's outputs and rate, compared with another engine's for the same prompts."""
    compare_tokens_per_s = sum(map(len, expected)) / seconds
    equal = sum(ours == theirs for ours, theirs in zip(outputs, expected, strict=True))
    return {
        "compare_tokens_per_s": compare_tokens_per_s,
        "times_faster": tokens_per_s / compare_tokens_per_s,
        "equal_outputs": f"{equal}/{len(outputs)}" if same_weights else "-",
    }
