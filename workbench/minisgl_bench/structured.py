"""`minisgl bench structured`: what grammars cost in throughput, to the first token and per mask.
And what they gain by guesses.

Requests of equal length decode together, some of them each with a different JSON schema; runs with
and without schemas take turns in one engine. The schemas allow no end before the last token, so all
runs have equally many tokens.

With random weights, strings would not end before their bound, as they do in real models' answers.
So all requests, with a schema or without, have a bias with which one token in six ends a string.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeAlias

import click
import numpy as np

from minisgl_backend.cli.options import EngineCommand, engine_options
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.errors import MiniSGLError
from minisgl_backend.grammar.matchers import Batch, Grammars, Matcher
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.models.hub import resolve_model
from minisgl_backend.prompt_encoder import tokenizer_folder
from minisgl_backend.request import Grammar, GrammarKind, IntArray, SamplingParams, TokenId
from minisgl_backend.runtime.engine import Engine
from minisgl_backend.text.tokenizer_files import load_definition, load_vocabulary
from minisgl_bench.dummy_model import SHAPES, write_dummy_model
from minisgl_bench.engines import engine_facts, running_engine, submitted
from minisgl_bench.profiling import nvtx_option, profile_option, profiled
from minisgl_kit.option_types import POSITIVE_INT, TEMPERATURE
from minisgl_kit.report import Report, json_option, machine_facts, write_json

_FIELDS: Final[tuple[dict[str, Any], ...]] = (
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "integer", "minimum": 0, "maximum": 100_000},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["low", "medium", "high"]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
)
"""The kinds of fields besides strings, and objects with a string."""
_NEVER_OVER: Final = 200
"""The least items of an answer's list: more than an answer in a benchmark has room for."""
_MASK_ROWS: Final = 16
"""Rows that are timed one by one."""
_MASK_STEPS: Final = 60
_ENDING: Final = 1 / 6
"""The share of the tokens in a string that end it."""
_MOST_BIASED: Final = 64


def record_schema(num_fields: int, seed: int, max_length: int | None) -> dict[str, Any]:
    """An object of ``num_fields`` fields of all kinds; each seed has names of its own. Strings have
    ``max_length`` characters at most."""
    string: dict[str, Any] = {"type": "string"}
    if max_length is not None:
        string["maxLength"] = max_length
    address = {
        "type": "object",
        "properties": {"street": string, "number": {"type": "integer"}},
        "required": ["street"],
        "additionalProperties": False,
    }
    fields = (string, *_FIELDS, address)
    chance = random.Random(seed)
    names = [f"{chance.choice(('name', 'value', 'code'))}_{seed}_{n}" for n in range(num_fields)]
    return {
        "type": "object",
        "properties": {name: chance.choice(fields) for name in names},
        "required": names,
        "additionalProperties": False,
    }


Bias: TypeAlias = tuple[tuple[TokenId, float], ...]


def quotes_of(tokenizer: Path, vocab_size: int) -> list[TokenId]:
    """Tokens that begin with a quotation mark, and so end a string, the shortest first; none beyond
    the model's ``vocab_size``."""
    pieces = load_vocabulary(tokenizer).pieces[:vocab_size]
    found = [token for token, piece in enumerate(pieces) if piece.startswith(b'"')]
    return sorted(found, key=lambda token: len(pieces[token]))[:_MOST_BIASED]


def bias_to_end_strings(options: EngineOptions) -> Bias:
    """A bias with which ``_ENDING`` of equally likely tokens begin with a quotation mark."""
    vocab_size = load_spec(resolve_model(options.model, options.model_source)).vocab_size
    quotes = quotes_of(tokenizer_folder(options), vocab_size)
    odds = _ENDING / (1 - _ENDING) * (vocab_size - len(quotes)) / len(quotes)
    return tuple((token, math.log(odds)) for token in quotes)


def endless_schema(seed: int, max_length: int | None, *, compact: bool = False) -> Grammar:
    """A list of records that no answer in a benchmark can end; if ``compact``, without white
    space."""
    record = record_schema(8, seed, max_length)
    schema: dict[str, Any] = {"type": "array", "items": record, "minItems": _NEVER_OVER}
    if compact:
        schema["x-guidance"] = {"whitespace_flexible": False}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Requests that decode together, with prompts and answers of these lengths."""

    requests: int
    input_length: int
    output_length: int
    temperature: float
    bias: Bias = ()
    max_length: int | None = None

    def rate(self, engine: Engine, seed: int, grammars: Sequence[Grammar | None]) -> float:
        """Tokens per second if all are submitted at once."""
        rng = np.random.default_rng(seed)
        vocab_size = engine.info.vocab_size
        prompts = rng.integers(0, vocab_size, (self.requests, self.input_length), np.int32)
        sinks = []
        started = time.perf_counter()
        for index, (prompt, grammar) in enumerate(zip(prompts, grammars, strict=True)):
            sampling = SamplingParams(
                max_tokens=self.output_length,
                temperature=self.temperature,
                seed=index,
                ignore_eos=grammar is None,
                logit_bias=self.bias,
                grammar=grammar,
            )
            sinks.append(submitted(engine, prompt, sampling))
        for sink in sinks:
            sink.wait()
        seconds = time.perf_counter() - started
        num_tokens = sum(len(sink.tokens) for sink in sinks)
        if num_tokens != self.requests * self.output_length:
            raise click.ClickException(f"answers ended early: {num_tokens} tokens in all")
        return num_tokens / seconds

    def grammars(self, share: float, seed: int) -> list[Grammar | None]:
        """A different schema for each of a share of the requests, evenly spread."""
        return [
            endless_schema(seed + index, self.max_length)
            if int((index + 1) * share) > int(index * share)
            else None
            for index in range(self.requests)
        ]


def rates_without(streams: Streams, options: EngineOptions, rounds: int) -> list[float]:
    """The rates of an engine that takes no grammars, and whose memory is free again afterwards."""
    none: list[Grammar | None] = [None] * streams.requests
    with running_engine(options) as (engine, _):
        return [streams.rate(engine, seed, none) for seed in range(rounds + 1)][1:]


def throughput(streams: Streams, engine: Engine, rounds: int, off_rates: Sequence[float]) -> Report:
    """Rates by the share of constrained requests, each next to the same runs without grammars;
    ``off_rates`` are those of an engine that takes no grammars."""
    report = Report("tokens a second, by share of requests with a schema")
    none: list[Grammar | None] = [None] * streams.requests
    streams.rate(engine, 0, none)
    seed = 1
    for share, schemas in ((0.0, "-"), (0.2, "known"), (1.0, "known"), (1.0, "new")):
        known = streams.grammars(share, 0)
        streams.rate(engine, 0, known)  # which compiles them
        plain, measured = [], []
        for _ in range(rounds):
            grammars = known if schemas != "new" else streams.grammars(share, 1000 * seed)
            plain.append(streams.rate(engine, seed, none))
            measured.append(streams.rate(engine, seed + 1, grammars))
            seed += 2
        if not share:
            plain = [*off_rates]
        report.add(
            constrained=f"{100 * share:.0f} %",
            schemas=schemas,
            plain_tokens_per_s=round(statistics.median(plain)),
            tokens_per_s=round(statistics.median(measured)),
            share=statistics.median(measured) / statistics.median(plain),
            spread=max(max(rates) / min(rates) - 1 for rates in (plain, measured)),
        )
    return report


def first_token(engine: Engine, streams: Streams, num_fields: int, rounds: int) -> Report:
    """Milliseconds to the first token of a lone request: without a grammar, with a new schema, and
    with the same schema again."""
    rng = np.random.default_rng(5)

    def first_ms(grammar: Grammar | None) -> float:
        prompt = rng.integers(0, engine.info.vocab_size, streams.input_length).astype(np.int32)
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, grammar=grammar)
        sink = submitted(engine, prompt, sampling)
        sink.wait()
        return (sink.times_s[0] - sink.sent_s) * 1e3

    found: dict[str, list[float]] = {"none": [], "new": [], "known": []}
    for seed in range(rounds):
        source = record_schema(num_fields, 10**6 + seed, streams.max_length)
        schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(source))
        for name, grammar in (("none", None), ("new", schema), ("known", schema)):
            found[name].append(first_ms(grammar))
    report = Report(f"ms to the first token, with a schema of {num_fields} fields")
    plain = statistics.median(found["none"])
    for name, times in found.items():
        p50 = statistics.median(times)
        report.add(schema=name, p50_ms=p50, most_ms=max(times), later_ms=p50 - plain)
    return report


def alone(engine: Engine, streams: Streams, rounds: int) -> Report:
    """What steps give a lone request with a schema that allows white space, and one that does not:
    a token, and the guesses that were right."""
    rng = np.random.default_rng(6)
    report = Report("lone requests with a schema")
    for compact in (False, True):
        before, num_tokens, ms = engine.stats().scheduler, 0, 0.0
        for seed in range(rounds):
            prompt = rng.integers(0, engine.info.vocab_size, streams.input_length).astype(np.int32)
            sampling = SamplingParams(
                max_tokens=streams.output_length,
                temperature=streams.temperature,
                seed=seed,
                logit_bias=streams.bias,
                grammar=endless_schema(10**7 + seed, streams.max_length, compact=compact),
            )
            sink = submitted(engine, prompt, sampling)
            sink.wait()
            num_tokens += len(sink.tokens)
            ms += 1e3 * (sink.times_s[-1] - sink.times_s[0])
        after = engine.stats().scheduler
        num_right = after.num_right_guesses - before.num_right_guesses
        report.add(
            white_space="none" if compact else "allowed",
            tokens=num_tokens,
            guesses=after.num_guesses - before.num_guesses,
            right=num_right,
            tokens_per_step=round(num_tokens / (num_tokens - num_right), 2),
            ms_per_token=round(ms / max(num_tokens - rounds, 1), 3),
        )
    return report


def masks(folders: Mapping[str, Path], streams: Streams) -> Report:
    """Microseconds on the host, by vocabulary: of the mask of one row, of one token of a row, and
    of all masks and tokens of a batch."""
    report = Report("masks and tokens on the host, microseconds")
    for name, folder in folders.items():
        report.add(vocabulary=name, **_mask_times(folder, streams.requests, streams.max_length))
    return report


def _mask_times(folder: Path, batch_size: int, max_length: int | None) -> dict[str, float]:
    spec = load_spec(folder)
    vocab_size, eos = spec.vocab_size, tuple(spec.eos_token_ids)
    quotes = set(quotes_of(folder, vocab_size))
    grammars = Grammars(partial(load_definition, folder), vocab_size=vocab_size, eos_token_ids=eos)
    try:
        matchers = [
            _compiled(grammars, endless_schema(seed, max_length)) for seed in range(batch_size)
        ]
        every, first = Batch(matchers), Batch(matchers[:1])
        rows, rest = [Batch([matcher]) for matcher in matchers[:_MASK_ROWS]], Batch(matchers[1:])
        lines: IntArray = np.zeros((batch_size, grammars.num_words), np.int32)
        chance = random.Random(0)
        row_us, token_us, batch_us, step_us = [], [], [], []
        for _ in range(_MASK_STEPS):
            for row in rows:
                row_us.append(_microseconds(partial(_fill, grammars, row, lines[:1])))
            batch_us.append(_microseconds(partial(_fill, grammars, every, lines)))
            tokens = [_drawn(line, vocab_size, quotes, chance) for line in lines]
            token_us.append(_microseconds(partial(grammars.advance, first, tokens[:1])))
            step_us.append(_microseconds(partial(grammars.advance, rest, tokens[1:])))
    finally:
        grammars.close()
    return {
        "mask_p50": float(np.percentile(row_us, 50)),
        "mask_p99": float(np.percentile(row_us, 99)),
        "token_p50": float(np.percentile(token_us, 50)),
        "rows": batch_size,
        "masks_p50": float(np.percentile(batch_us, 50)),
        "masks_p99": float(np.percentile(batch_us, 99)),
        "tokens_p50": float(np.percentile(step_us, 50)),
    }


def _fill(grammars: Grammars, batch: Batch, masks: IntArray) -> None:
    grammars.fill(batch, masks).result()


def _microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def _drawn(line: IntArray, vocab_size: int, quotes: Set[TokenId], chance: random.Random) -> TokenId:
    """A random token that a mask allows; it ends a string as often as the bias implies."""
    bits = np.unpackbits(line.view(np.uint8), bitorder="little")[:vocab_size]
    allowed = np.flatnonzero(bits).tolist()
    ending = [token for token in quotes if bits[token]]
    others = len(allowed) - len(ending)
    if ending and (not others or chance.random() < _ENDING):
        return chance.choice(ending)
    return int(chance.choice(allowed))


def _compiled(grammars: Grammars, grammar: Grammar) -> Matcher:
    found: SimpleQueue[Matcher | MiniSGLError] = SimpleQueue()
    grammars.compile(SamplingParams(grammar=grammar), found.put)
    outcome = found.get()
    if isinstance(outcome, MiniSGLError):
        raise outcome
    return outcome


@click.command(cls=EngineCommand)
@engine_options
@click.option("--requests", type=POSITIVE_INT, default=256, show_default=True, help="at once")
@click.option("--input-length", type=POSITIVE_INT, default=128, show_default=True)
@click.option("--output-length", type=POSITIVE_INT, default=512, show_default=True)
@click.option("--temperature", type=TEMPERATURE, default=1.0, show_default=True)
@click.option(
    "--rounds", type=POSITIVE_INT, default=3, show_default=True, help="runs of each kind, in turns"
)
@click.option(
    "--fields",
    type=POSITIVE_INT,
    default=50,
    show_default=True,
    help="of the schemas whose first token is timed",
)
@click.option(
    "--max-length",
    type=POSITIVE_INT,
    help="characters of a string, in its schema  [default: no bound]",
)
@click.option(
    "--vocabulary",
    "shape",
    type=click.Choice(sorted(SHAPES)),
    default="qwen3-0.6b",
    show_default=True,
    help="the model whose vocabulary's size masks are also timed for",
)
@nvtx_option
@profile_option
@json_option
def structured(
    options: EngineOptions,
    requests: int,
    input_length: int,
    output_length: int,
    temperature: float,
    rounds: int,
    fields: int,
    max_length: int | None,
    shape: str,
    nvtx: bool,
    profile_path: Path | None,
    json_path: Path | None,
) -> None:
    """What structured outputs cost: throughput, time to the first token, masks. What they gain by
    guesses, with --speculative-tokens or --speculative-mtp-tokens."""
    streams = Streams(
        requests=requests,
        input_length=input_length,
        output_length=output_length,
        temperature=temperature,
        bias=bias_to_end_strings(options),
        max_length=max_length,
    )
    off_rates = rates_without(streams, replace(options, structured_outputs=False), rounds)
    with running_engine(options, nvtx=nvtx) as (engine, _):
        facts = engine_facts(engine.info, options)
        facts |= {"requests": requests, "prompt": input_length, "answer": output_length}
        facts["max_length"] = max_length
        reports = {
            "throughput": throughput(streams, engine, rounds, off_rates),
            "first_token": first_token(engine, streams, fields, 4 * rounds),
            "alone": alone(engine, streams, rounds),
        }
        if profile_path is not None:
            with profiled(profile_path):
                streams.rate(engine, 10**5, streams.grammars(1.0, 0))
    with tempfile.TemporaryDirectory() as scratch:
        write_dummy_model(shape, Path(scratch))
        folders = {"2,048": Path(DEMO_MODEL), f"{SHAPES[shape]['vocab_size']:,}": Path(scratch)}
        reports["masks"] = masks(folders, streams)
    for report in reports.values():
        report.emit()
    if json_path is not None:
        rows = {name: report.rows for name, report in reports.items()}
        write_json(json_path, {"title": "structured", "info": {**facts, **machine_facts()}, **rows})
