"""The generations of a request, between a route, which makes them, and ``Service``, which has them
answered.

Must not know how an answer is sent, or an API's JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from minisgl_client.answer import Result
from minisgl_client.errors import MinisglError

from minisgl_gateway.counts import Counts
from minisgl_gateway.engine_errors import api_error
from minisgl_gateway.generation import Generation
from minisgl_gateway.parts import AnswerReader, Piece
from minisgl_gateway.renderers import Renderer


@dataclass(frozen=True, slots=True)
class Job:
    """The generations of a request, one per prompt, and how their answers are read and rendered.

    ``of_form`` words errors about the form of the answer (``engine_errors.api_error``). Each
    generation has ``num_choices`` choices, for which the engine makes ``num_samples``. There is a
    reader for each choice, those of the first prompt first.
    """

    generations: Sequence[Generation]
    readers: Sequence[AnswerReader]
    renderer: Renderer
    of_form: Callable[[str], tuple[str, str]]
    num_choices: int
    num_samples: int

    @property
    def num_answers(self) -> int:
        """Samples that the engine makes, of all prompts."""
        return len(self.generations) * self.num_samples

    def call(self, index: int) -> dict[str, Any]:
        """The arguments of a call of the engine, with an id of its own for each prompt."""
        generation = self.generations[index]
        return {
            "prompt": generation.prompt,
            "messages": generation.messages,
            "input_ids": generation.input_ids,
            "tools": generation.tools,
            "request_id": f"{self.renderer.id}.{index}",
            **generation.parameters,
        }

    def read(self, results: Sequence[Result]) -> tuple[list[Piece], Counts]:
        """The pieces of all choices, each of which is whole, and their counts; raises
        ``ApiError``."""
        pieces, counts = list[Piece](), Counts()
        choices = [each for result in results for each in enumerate(result.samples)]
        for reader, (sample, choice) in zip(self.readers, choices, strict=True):
            piece = reader.push(choice)
            counts.add(choice, prompt=sample == 0, num_thought_tokens=piece.num_thought_tokens)
            pieces.append(piece)
        return pieces, counts

    @contextmanager
    def errors(self, index: int) -> Iterator[None]:
        """Turn errors of the engine about the prompt of an index into ``ApiError``s of this
        request."""
        try:
            yield
        except MinisglError as error:
            renderer = self.renderer
            names = renderer.names
            if len(self.generations) > 1:
                names = {**names, **named_prompt("prompt", index, len(self.generations))}
            raise api_error(error, renderer.fields, names, self.of_form) from error


def named_prompt(param: str, index: int, num_prompts: int) -> dict[str, str]:
    """What errors call the prompt of an index, which the parameter has given."""
    return {"prompt": param if num_prompts == 1 else f"{param}[{index}]"}
