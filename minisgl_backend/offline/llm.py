"""``LLM``: the engine in this process, from prompts to text.

Options, parameters, defaults and errors are those of the server; ``docs/offline.md`` has examples.
An ``LLM`` may be used by several threads; each output iterator belongs to one of them. Must not
know Triton.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from minisgl_backend.build import build_engine
from minisgl_backend.config import DEMO_MODEL, EngineOptions
from minisgl_backend.generation_request import request_of
from minisgl_backend.limits import Limits
from minisgl_backend.offline.call import Call, Output, PreparedPrompt
from minisgl_backend.offline.prompts import Params, Prompt, naming, read_prompts, with_all
from minisgl_backend.offline.submitter import Submitter
from minisgl_backend.progress import shown, unseen
from minisgl_backend.prompt_encoder import load_encoder
from minisgl_backend.request import FloatArray, IntArray, SamplingParams, samples_of
from minisgl_backend.request_defaults import request_defaults
from minisgl_backend.runtime.engine_base import EngineInfo
from minisgl_backend.runtime.recorder import EngineStats
from minisgl_backend.text.tokenizer import PromptEncoder
from minisgl_backend.wire.generation import Generation
from minisgl_backend.wire.packets import StreamStart


class LLM:
    """A model and the engine that runs it, until ``close`` or the end of a ``with`` block.

    ``model`` is a folder or an id of a hub, ``options`` are those of ``minisgl serve`` with
    underscores. Raises ``ConfigError``.
    """

    def __init__(
        self, model: str | Path = DEMO_MODEL, **options: str | int | float | bool | None
    ) -> None:
        self._options = EngineOptions.from_mapping({"model": str(model), **options})
        self._limits = Limits()
        self._defaults = request_defaults(self._options)
        self._encoder = load_encoder(self._options, self._limits)
        self._seeds = random.Random(self._options.seed)
        self._engine = build_engine(self._options)
        self._submitter = Submitter(self._engine, num_tokenizers=self._options.num_tokenizers)
        # called when this object is collected, or before the interpreter ends: later, a thread
        # inside PyTorch would abort the process
        self._finalizer = weakref.finalize(self, _end, self._submitter, threading.get_ident())

    @property
    def info(self) -> EngineInfo:
        """Fixed facts of the loaded model: context, dtype, device, number of pages, ..."""
        return self._engine.info

    def stats(self) -> EngineStats:
        """The engine's counts at this moment."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        progress: bool = False,
    ) -> list[Output]:
        """One complete output for each prompt, in the order of the prompts; with ``n`` samples of
        the answer, ``n`` outputs, one after the other.

        ``params`` apply to every prompt, or are a list with one mapping for each. Names and values
        are those of the wire; JSON may be given as Python objects (``tools``,
        ``chat_template_kwargs``, ``structured_outputs``). If a prompt or a parameter is wrong,
        nothing is computed. A grammar that cannot be compiled ends the call later. ``progress``
        draws a bar on stderr if that is a terminal, and otherwise logs.

        Raises ``RequestError``; ``Overloaded`` if a deadline passed before the first token, or
        ``max_queue_time_s`` in the queue; ``EngineFailure``; ``Cancelled`` if the ``LLM`` is
        closed.
        """
        call = self._call(prompts, params, stream=False)
        outputs: list[Output] = []
        num_tokens, started_s = 0, time.perf_counter()
        bar = shown if progress else unseen
        with closing(self._outputs(call)) as each, bar("prompts", len(call)) as advance:
            for output in each:
                outputs.append(output)
                num_tokens += output.num_output_tokens
                if not output.sample:  # all samples of a prompt come together
                    advance(f"{num_tokens / (time.perf_counter() - started_s):,.0f} tokens/s")
        return sorted(outputs, key=lambda output: (output.index, output.sample))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
    ) -> Generator[Output, None, None]:
        """Outputs as they come, each with the new text of one ``sample`` for the prompt ``index``.

        The last output of a sample has a ``finish_reason``. Closing the iterator ends the requests.
        Errors are those of ``generate``; a wrong prompt or parameter raises immediately, not at the
        first output.
        """
        return self._outputs(self._call(prompts, params, stream=True))

    def adapters(self) -> list[str]:
        """The names of the LoRA adapters that ``lora_name`` may be."""
        return list(self._engine.adapters.known()) if self._engine.takes_adapters else []

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Let requests name the adapter in the folder ``path``. Raises ``InvalidRequest`` with the
        tensor or field that does not fit, ``Unsupported`` without the option enable_lora, and
        ``Cancelled`` if the ``LLM`` is closed."""
        self._submitter.check_open()
        self._engine.adapters.load(name, str(path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it go on. Errors are those of ``load_adapter``."""
        self._submitter.check_open()
        self._engine.adapters.unload(name)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
    ) -> list[FloatArray]:
        """The embedding of each prompt, in their order: float32[hidden_size] of length 1, from the
        prompt's last token.

        ``params`` may hold what concerns prompts, such as ``lora_name``, for all prompts or as a
        list with one mapping for each. Errors are those of ``generate``.
        """
        outputs = self.generate(prompts, with_all(params, {"embed": True}))
        return [output.embedding for output in outputs if output.embedding is not None]

    def close(self) -> None:
        """End all requests and the engine, and free its memory. Idempotent.

        Calls in other threads raise ``Cancelled``. Ctrl-C only ends the waiting.
        """
        self._submitter.end()
        self._submitter.wait()
        self._finalizer.detach()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outputs(self, call: Call) -> Generator[Output, None, None]:
        """The call's outputs. The iterator keeps this object alive, as its end would end them."""
        yield from call.outputs()

    def _call(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        *,
        stream: bool,
    ) -> Call:
        """All requests of a call, checked before the first of them is submitted."""
        arrived_s, arrival_time_ns = time.monotonic(), time.time_ns()
        self._submitter.check_open()
        generations = read_prompts(
            prompts,
            params,
            stream=stream,
            arrival_time_ns=arrival_time_ns,
            defaults=self._defaults,
            limits=self._limits,
        )
        prepared = []
        several = len(generations) > 1
        with closing(self._tokenized(generations)) as tokenized:
            for index, generation in enumerate(generations):
                with naming(index if several else None):
                    ids, sampling = next(tokenized)
                    generation = replace(generation, sampling=sampling)
                    prepared.append(self._prepared(generation, ids, arrived_s))
        return Call(self._submitter, self._encoder.vocabulary, prepared)

    def _tokenized(
        self, generations: Sequence[Generation]
    ) -> Generator[tuple[IntArray, SamplingParams], None, None]:
        """The token ids of each prompt, int32[num_prompt_tokens], and its sampling parameters.
        Tokenizes several prompts at a time."""
        encode = partial(_encode, self._encoder, self._engine.most_tokens)
        if len(generations) == 1:
            yield encode(generations[0])
        else:  # jobs must not refer to this object, else a thread of the pool might collect it
            jobs = [partial(encode, generation) for generation in generations]
            yield from self._submitter.run_all(jobs)

    def _prepared(self, generation: Generation, ids: IntArray, arrived_s: float) -> PreparedPrompt:
        self._encoder.check_token_ids("stop_token_ids", generation.sampling.stop_token_ids)
        timeout_ms = generation.timeout_ms
        request = request_of(
            generation,
            ids,
            self._engine,
            id=self._engine.new_id(),
            seeds=self._seeds,
            deadline_s=None if timeout_ms is None else arrived_s + timeout_ms / 1000,
        )
        self._engine.check(request, generation.best_of)
        if not generation.exclude_input_in_output:
            prompt_text = self._encoder.prompt_text(
                generation.prompt, ids, skip_special_tokens=generation.skip_special_tokens
            )
            generation = replace(generation, prompt_text=prompt_text)
        start = StreamStart.of(
            generation,
            num_input_tokens=len(ids),
            eos_token_ids=self._engine.info.eos_token_ids,
        )
        others = (self._engine.new_id() for _ in range(generation.best_of - 1))
        samples = samples_of(request, [request.id, *others])
        return PreparedPrompt(samples, start, generation.arrival_time_ns)


def _encode(
    encoder: PromptEncoder, most_tokens: int, generation: Generation
) -> tuple[IntArray, SamplingParams]:
    prompt = encoder.rendered(generation.prompt)
    sampling = encoder.after_thinking(generation.sampling, prompt)
    return encoder.encode(prompt, most_tokens), sampling


def _end(submitter: Submitter, maker: int) -> None:
    """``maker`` is the thread that created the ``LLM``."""
    submitter.end()
    # any thread may collect an LLM in a reference cycle, even one for which the submitter waits
    if threading.get_ident() in (maker, threading.main_thread().ident):
        submitter.wait()
