"""`minisgl bench offline`: throughput of the engine in this process, without a server.

All requests are submitted at once. With `--compare transformers` the same prompts then go, one by
one, through `transformers.generate` on the same device, in the same dtype and the same run; with
`--compare NAME=VALUE,...` through an engine of these options; with `--n 16 --compare requests` each
of the 16 samples of a prompt is a request of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import EngineOptions
from minisgl_backend.request import MAX_SAMPLES, SamplingParams
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_bench.comparison import compare_option, measure_both
from minisgl_bench.engines import engine_facts, running_engine_or_replicas
from minisgl_bench.profiling import nvtx_option, profile_option, profiled
from minisgl_bench.prompts import Prompt, RandomRequests, request_options
from minisgl_bench.runs import TransformersRunner, beside, figures_of, run_engine
from minisgl_kit.option_types import POSITIVE, FiniteRange
from minisgl_kit.report import Report, json_option

_TRANSFORMERS: Final = "transformers"
_REQUESTS: Final = "requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offline:
    """What is measured of an engine: ``n`` samples of each prompt of ``requests``; ``compare`` is
    the option's value."""

    requests: RandomRequests
    sampling: SamplingParams
    n: int
    compare: str | None
    nvtx: bool

    def measure(self, options: EngineOptions, trace: Path | None) -> Report:
        """The figures of an engine with these options; ``trace`` is for the profile of a separate
        run."""
        apart = None
        traced = trace is not None
        with running_engine_or_replicas(options, nvtx=self.nvtx, traced=traced) as engine:
            info = engine.info
            prompts = self.requests.prompts(info.vocab_size)
            warm_up = self.requests.warm_up(info.vocab_size)
            run_engine(engine, warm_up, self.sampling, n=self.n)
            steps = engine.stats().num_steps
            sinks, seconds = run_engine(engine, prompts, self.sampling, n=self.n)
            steps = engine.stats().num_steps - steps
            if self.compare == _REQUESTS:
                apart = run_engine(engine, prompts, self.sampling, n=self.n, apart=True)
            facts = engine_facts(info, options) | {"sampling": self._sampling_words()}
            if trace is not None:
                again = self.requests.again(info.vocab_size)
                with profiled(trace):
                    run_engine(engine, again, self.sampling, n=self.n)
        figures = figures_of(prompts, sinks, seconds)
        figures["n"] = self.n
        figures["mean_batch"] = figures["output_tokens"] / steps
        outputs, rate = [sink.tokens for sink in sinks], figures["tokens_per_s"]
        if apart is not None:
            figures |= beside(outputs, rate, [sink.tokens for sink in apart[0]], apart[1])
        if self.compare == _TRANSFORMERS:
            theirs = run_transformers(options, info, warm_up[:2], prompts)
            figures |= beside(outputs, rate, *theirs, same_weights=_has_weights(options))
        report = Report("offline throughput", info=facts)
        report.add(**figures)
        return report

    def _sampling_words(self) -> str:
        sampling = self.sampling
        asked = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "logprobs": "no" if sampling.num_logprobs is None else sampling.num_logprobs,
        }
        return " ".join(f"{name}={value}" for name, value in asked.items())


def run_transformers(
    options: EngineOptions, info: EngineInfo, warm_up: list[Prompt], prompts: list[Prompt]
) -> tuple[list[list[int]], float]:
    """The tokens and the seconds of transformers, with the engine's model, dtype and device."""
    from minisgl_backend.models.hub import resolve_model

    folder = resolve_model(options.model, options.model_source)
    runner = TransformersRunner(folder, info.dtype, info.device, has_weights=_has_weights(options))
    runner.warm_up(warm_up)
    return runner.run(prompts)


def _has_weights(options: EngineOptions) -> bool:
    """Whether the weights are the checkpoint's, so that two engines have the same."""
    return options.load_format != "dummy"


@click.command(cls=EngineCommand)
@engine_options
@request_options
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is off")
@click.option("--top-p", type=FiniteRange(0, 1), default=1.0, show_default=True, help="1 is off")
@click.option(
    "--repetition-penalty",
    type=POSITIVE,
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
    if compare == _TRANSFORMERS and n > 1:
        raise click.UsageError("--compare transformers needs --n 1")
    if compare == _TRANSFORMERS and (requests.temperature or repetition_penalty != 1):
        raise click.UsageError("--compare transformers needs --temperature 0, and no penalty")
    sampling = SamplingParams(
        temperature=requests.temperature,
        top_k=top_k,
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        num_logprobs=logprobs,
    )
    of = Offline(requests=requests, sampling=sampling, n=n, compare=compare, nvtx=nvtx)
    other = None if compare in (_TRANSFORMERS, _REQUESTS) else compare
    keys = ("requests", "prompt_tokens", "output_tokens", "longest")
    measure_both(of.measure, options, other, keys=keys, trace=profile_path, json_path=json_path)
