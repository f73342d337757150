"""A parsed generation -> the engine's request, with everything that it leaves open.

Must not know how a generation came, or how its answer goes.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Protocol

from minisgl_backend.request import Adapter, IntArray, Request, RequestId, SamplingParams
from minisgl_backend.wire.generation import Generation


class RequestTaker(Protocol):
    """The part of the engine that is needed here."""

    def adapter(self, name: str | None, task_id: int | None) -> Adapter | None:
        """The adapter that a request names."""

    def fitted(self, sampling: SamplingParams, *, num_prompt_tokens: int) -> SamplingParams:
        """The same parameters, with ``max_tokens`` lowered to the room there is."""


def request_of(
    generation: Generation,
    prompt: IntArray,
    engine: RequestTaker,
    *,
    id: RequestId,
    seeds: random.Random,
    deadline_s: float | None,
    label: str = "",
) -> Request:
    """The request for the first sample, whose seed is drawn from ``seeds`` unless it is given.

    ``prompt``, int32[num_prompt_tokens], are the tokens of the generation's prompt. Raises
    ``RequestError`` if there is no such adapter.
    """
    sampling = generation.sampling
    if generation.seed is None:
        sampling = replace(sampling, seed=seeds.getrandbits(64))
    if generation.fit_max_tokens:
        sampling = engine.fitted(sampling, num_prompt_tokens=len(prompt))
    return Request(
        id=id,
        prompt=prompt,
        sampling=sampling,
        priority=generation.priority,
        deadline_s=deadline_s,
        cache_salt=generation.cache_salt,
        adapter=engine.adapter(generation.lora_name, generation.lora_task_id),
        label=label,
    )
